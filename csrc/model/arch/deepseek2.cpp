// deepseek2: DeepSeek-V2(-Lite), V3, R1, Kimi-K2; also deepseek32 (V3.2) and glm-dsa (GLM-5), whose attention is sparse
// beyond a number of positions. Multi-head latent attention (arXiv:2405.04434), computed in absorbed form: the
// cache has one latent and one rotary key per token, kv_b's key half is folded into the queries, and its value half is
// applied after attention. Files have kv_b split (attn_k_b, attn_v_b) or whole (attn_kv_b, older converters).
#include <cmath>

#include "model/builder.h"

namespace dyno::model {

void latent_attention(Builder& b, LayerSpec& layer, int64_t i, RopeSpec rope) {
  ModelDesc& m = b.model;
  AttentionSpec& a = layer.attention;
  a.kind = AttentionKind::mla;
  a.heads = b.integer("attention.head_count", 1);
  a.kv_heads = 1;
  a.kv_lora = b.integer("attention.kv_lora_rank", 1);
  // Files with a split kv_b have the cache's row size in key_length and the head's own size in key_length_mla.
  const bool split = b.has_tensor(b.blk(i, "attn_k_b.weight"));
  const int64_t key_head = split ? b.integer("attention.key_length_mla", 1) : b.integer("attention.key_length", 1);
  a.v_head = split ? b.integer("attention.value_length_mla", 1) : b.integer("attention.value_length", 1);
  a.nope = key_head - rope.n_rot;
  DYNO_CHECK(ModelError, a.nope > 0, "[model] key heads have ", key_head, " dims, of which ", rope.n_rot,
             " rotate; expected fewer than all");
  a.dk = a.kv_lora + rope.n_rot;
  a.dv = a.kv_lora;

  // YaRN's magnitude becomes part of the attention scale, squared because it applies to queries and keys.
  const double log_multiplier = b.real_or("rope.scaling.yarn_log_multiplier", 0);
  const double mscale = rope.scaling == RopeScaling::yarn ? 1.0 + log_multiplier * std::log(rope.factor) : 1.0;
  rope.yarn_scales_cos_sin = false;
  a.scale = mscale * mscale / std::sqrt(static_cast<double>(key_head));
  a.rope = rope;

  layer.attn_norm = b.vector(b.blk(i, "attn_norm.weight"), m.n_embd);
  const int64_t q_lora = b.integer_or("attention.q_lora_rank", 0);
  if (q_lora > 0) {
    a.q_a = b.matrix(b.blk(i, "attn_q_a.weight"), q_lora, m.n_embd);
    a.q_a_norm = b.vector(b.blk(i, "attn_q_a_norm.weight"), q_lora);
    a.q_b = b.matrix(b.blk(i, "attn_q_b.weight"), a.heads * key_head, q_lora);
  } else {
    a.q = b.matrix(b.blk(i, "attn_q.weight"), a.heads * key_head, m.n_embd);
  }
  a.kv_a = b.matrix(b.blk(i, "attn_kv_a_mqa.weight"), a.kv_lora + rope.n_rot, m.n_embd);
  a.kv_a_norm = b.vector(b.blk(i, "attn_kv_a_norm.weight"), a.kv_lora);
  if (split) {
    a.k_b = b.stack(b.blk(i, "attn_k_b.weight"), a.heads, a.kv_lora, a.nope);
    a.v_b = b.stack(b.blk(i, "attn_v_b.weight"), a.heads, a.v_head, a.kv_lora);
  } else {
    const std::string name = b.blk(i, "attn_kv_b.weight");
    const TensorInfo& kv_b = b.expect_tensor(name, {a.kv_lora, a.heads * (a.nope + a.v_head)});
    // Transposing the key half breaks quantisation blocks, so it becomes a float matrix; float types are kept.
    const DType transposed = is_float(kv_b.type) ? kv_b.type : DType::f32;
    a.k_b = b.derived(name, " (k, transposed)", Transform::kv_b_k_transposed, transposed, a.heads, a.kv_lora, a.nope);
    a.v_b = b.derived(name, " (v)", Transform::kv_b_v, kv_b.type, a.heads, a.v_head, a.kv_lora);
  }
  a.output = b.matrix(b.blk(i, "attn_output.weight"), m.n_embd, a.heads * a.v_head);
}

namespace {

// The selection of a layer of DeepSeek-V3.2 (arXiv:2512.02556) or GLM-5: its own, or that of an earlier layer.
void sparse_attention(Builder& b, LayerSpec& layer, int64_t i, RopeSpec rope) {
  ModelDesc& m = b.model;
  AttentionSpec& a = layer.attention;
  a.selects = m.chosen_positions;
  constexpr std::string_view kTypes = "attention.indexer.types";
  if (!b.layer_flag(kTypes, i).value_or(true)) {
    DYNO_CHECK(ModelError, i > 0, "[model] ", b.key(kTypes),
               "[0] is false, but there is no earlier layer whose selection layer 0 could use; expected true");
    return;
  }
  DYNO_CHECK(ModelError, a.q_a != kNone, "[model] layer ", i,
             " has an indexer, whose queries are products of low-rank queries; tensor ", b.blk(i, "attn_q_a.weight"),
             " is missing");
  AttentionSpec::Indexer& x = a.indexer;
  x.heads = b.integer("attention.indexer.head_count", 1);
  x.dk = b.integer("attention.indexer.key_length", 1);
  DYNO_CHECK(ModelError, rope.n_rot <= x.dk, "[model] ", b.key("attention.indexer.key_length"), " is ", x.dk, ", but ",
             rope.n_rot, " dimensions rotate; expected at least as many");
  x.rope = rope;
  x.rope.yarn_scales_cos_sin = false;
  x.rope.neox = m.architecture == "deepseek32";
  x.q_b = b.matrix(b.blk(i, "indexer.attn_q_b.weight"), x.heads * x.dk, m.weight(a.q_a).rows);
  x.k = b.matrix(b.blk(i, "indexer.attn_k.weight"), x.dk, m.n_embd);
  x.k_norm = b.vector(b.blk(i, "indexer.k_norm.weight"), x.dk);
  x.k_norm_bias = b.vector(b.blk(i, "indexer.k_norm.bias"), x.dk);
  x.weights = b.matrix(b.blk(i, "indexer.proj.weight"), x.heads, m.n_embd);
}

}  // namespace

void build_deepseek2(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  m.chosen_positions = b.has_key("attention.indexer.top_k") ? b.integer("attention.indexer.top_k", 1) : 0;
  const RopeSpec rope = b.rope(/*neox=*/false, b.integer("rope.dimension_count", 2));
  const int64_t dense = b.integer_or("leading_dense_block_count", 0);
  const int64_t width = b.integer_or("expert_feed_forward_length", 0);
  const int64_t shared = b.integer_or("expert_shared_count", 0) * width;
  for (const auto& [layer, i] : b.blocks()) {
    latent_attention(b, layer, i, rope);
    if (m.chosen_positions > 0) sparse_attention(b, layer, i, rope);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    if (i < dense) {
      b.dense_ffn(layer, i, b.feed_forward(i));
    } else {
      // Without a key for it, V2's routers use softmax. Routers with a selection bias, as in GLM-4.7-Flash, use
      // sigmoid.
      const bool corrected = b.has_tensor(b.blk(i, "exp_probs_b.bias"));
      b.moe_ffn(layer, i,
                {.gating = corrected ? ops::Gating::sigmoid : ops::Gating::softmax,
                 .normalize = false,
                 .width = width,
                 .shared_width = shared});
    }
  }
}

}  // namespace dyno::model
