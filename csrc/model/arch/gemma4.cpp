// gemma4 (Gemma 4): Gemma's scaled embeddings and four norms per layer, attention with scale 1, and a norm on values
// too. Sliding and full layers differ in head size, key-value heads and rope; full layers may use their keys as values.
// There are three styles: dense; experts in parallel to the dense FFN; per-layer embeddings with keys and values that
// later layers share.
#include <cmath>

#include "model/builder.h"

namespace dyno::model {
namespace {

// The last layers have no keys and values. They read those of the last earlier layer of the same kind.
int64_t source_of_keys(const Builder& b, int64_t i, int64_t own) {
  const bool local = b.is_local_layer(i, /*default_pattern=*/6);
  for (int64_t j = own - 1; j >= 0; --j) {
    if (b.is_local_layer(j, /*default_pattern=*/6) == local) return j;
  }
  throw ModelError(str_cat("[model] layer ", i, " shares keys and values, but the first ", own, " layers have no ",
                           local ? "local" : "global", " one to share with"));
}

void feed_forward(Builder& b, LayerSpec& layer, int64_t i) {
  const int64_t n_embd = b.model.n_embd;
  const auto norm = [&](std::string_view name) { return b.vector(b.blk(i, name), n_embd); };
  layer.ffn_norm = norm("ffn_norm.weight");
  b.dense_ffn(layer, i, b.feed_forward(i));
  layer.ffn.activation = ops::Activation::gelu_tanh;
  layer.ffn_post_norm = norm("post_ffw_norm.weight");
  if (!b.has_tensor(b.blk(i, "ffn_gate_inp.weight"))) return;
  FfnSpec& f = layer.beside.emplace();
  b.moe_ffn(f, i,
            {.gating = ops::Gating::softmax, .normalize = true, .width = b.integer("expert_feed_forward_length", 1)});
  f.activation = ops::Activation::gelu_tanh;
  f.router_norm = norm("ffn_gate_inp.scale");
  f.router_scale = 1.0 / std::sqrt(static_cast<double>(n_embd));
  f.expert_scale = b.vector_optional(b.blk(i, "ffn_down_exps.scale"), f.experts);
  layer.ffn_own_norm = norm("post_ffw_norm_1.weight");
  layer.beside_norm = norm("pre_ffw_norm_2.weight");
  layer.beside_own_norm = norm("post_ffw_norm_2.weight");
}

void layer_inputs(Builder& b) {
  ModelDesc& m = b.model;
  m.layer_input = b.integer_or("embedding_length_per_layer_input", 0);
  if (m.layer_input == 0) return;
  const int64_t width = m.layer_input * m.n_layers;
  m.layer_embd = b.matrix("per_layer_token_embd.weight", m.n_vocab, width);
  m.weights.back().table = true;
  m.layer_proj = b.matrix("per_layer_model_proj.weight", width, m.n_embd);
  m.layer_proj_norm = b.vector("per_layer_proj_norm.weight", m.layer_input);
}

}  // namespace

void build_gemma4(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  m.embedding_scale = std::sqrt(static_cast<double>(m.n_embd));
  m.logit_softcap = b.real_or("final_logit_softcapping", 0);
  layer_inputs(b);
  const int64_t window = b.integer("attention.sliding_window", 1);
  const int64_t key = b.integer("attention.key_length", 1), value = b.integer("attention.value_length", 1);
  const int64_t local_key = b.integer_or("attention.key_length_swa", key, 1);
  const int64_t local_value = b.integer_or("attention.value_length_swa", value, 1);
  const RopeSpec full = b.rope(/*neox=*/true);
  RopeSpec local = full;
  local.base = b.real_or("rope.freq_base_swa", 10000.0);
  local.n_rot = b.integer_or("rope.dimension_count_swa", local_key, 2);
  local.frequency_factors = kNone;
  local.scaling = RopeScaling::none;
  local.factor = 1.0;
  const int64_t shared = b.integer_or("attention.shared_kv_layers", 0);
  DYNO_CHECK(ModelError, shared < m.n_layers, "[model] ", shared, " of ", m.n_layers,
             " layers share keys and values; expected fewer, so that others compute them");
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    const bool is_local = b.is_local_layer(i, /*default_pattern=*/6);
    const int64_t own = m.n_layers - shared;
    b.gqa(layer, i, is_local ? local : full,
          {.key_length = is_local ? local_key : key,
           .value_length = is_local ? local_value : value,
           .v_may_be_k = true,
           .shared_kv = i >= own ? source_of_keys(b, i, own) : -1});
    AttentionSpec& a = layer.attention;
    a.scale = 1.0;
    a.v_norm = true;
    a.window = is_local ? window : 0;
    if (a.shared_kv >= 0) {
      const AttentionSpec& source = b.layer(a.shared_kv).attention;
      DYNO_CHECK(ModelError, source.kv_heads == a.kv_heads && source.dk == a.dk && source.dv == a.dv, "[model] layer ",
                 i, " shares keys and values of layer ", a.shared_kv, ", whose heads differ");
    }
    layer.attn_post_norm = b.vector(b.blk(i, "post_attention_norm.weight"), m.n_embd);
    feed_forward(b, layer, i);
    if (m.layer_input > 0) {
      layer.input_gate = b.matrix(b.blk(i, "inp_gate.weight"), m.layer_input, m.n_embd);
      layer.input_up = b.matrix(b.blk(i, "proj.weight"), m.n_embd, m.layer_input);
      layer.input_norm = b.vector(b.blk(i, "post_norm.weight"), m.n_embd);
    }
    if (b.has_tensor(b.blk(i, "layer_output_scale.weight"))) {
      layer.output_scale = b.number(b.blk(i, "layer_output_scale.weight"));
    }
  }
}

}  // namespace dyno::model
