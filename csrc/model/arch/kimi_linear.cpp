// kimi-linear (Kimi Linear): layers of Kimi delta attention (arXiv:2510.26692), in which every key channel has its own
// decay rate, and layers of latent attention without rotation; experts as in DeepSeek-V3, without groups.
#include "model/builder.h"

namespace dyno::model {
namespace {

void delta_attention(Builder& b, LayerSpec& layer, int64_t i) {
  const int64_t n_embd = b.model.n_embd;
  RecurrentSpec& r = layer.recurrent;
  r.kind = RecurrentKind::linear;
  r.channel_decay = true;
  r.sigmoid_gate = true;
  r.taps = b.conv_taps("ssm.conv_kernel");
  r.k_heads = r.v_heads = b.integer("attention.head_count", 1);
  r.dk = r.dv = b.integer("kda.head_dim", 1);
  DYNO_CHECK(UnsupportedError, r.dk <= kMaxStateHead, "[model] layer ", i, ": a head has ", r.dk, " dims; at most ",
             kMaxStateHead, " are supported");
  const int64_t width = r.v_heads * r.dv;
  layer.attn_norm = b.vector(b.blk(i, "attn_norm.weight"), n_embd);
  r.in = b.matrix(b.blk(i, "attn_q.weight"), width, n_embd);
  r.in_k = b.matrix(b.blk(i, "attn_k.weight"), width, n_embd);
  r.in_v = b.matrix(b.blk(i, "attn_v.weight"), width, n_embd);
  r.conv = b.values(b.blk(i, "ssm_conv1d_q.weight"), r.taps * width, r.taps);
  r.conv_k = b.values(b.blk(i, "ssm_conv1d_k.weight"), r.taps * width, r.taps);
  r.conv_v = b.values(b.blk(i, "ssm_conv1d_v.weight"), r.taps * width, r.taps);
  const int64_t step_rank = b.rows_of(b.blk(i, "ssm_f_a.weight"));
  r.step_low = b.matrix(b.blk(i, "ssm_f_a.weight"), step_rank, n_embd);
  r.step = b.matrix(b.blk(i, "ssm_f_b.weight"), width, step_rank);
  r.step_bias = b.values(b.blk(i, "ssm_dt.bias"), width);
  r.decay = b.values(b.blk(i, "ssm_a"), r.v_heads);
  r.beta = b.matrix(b.blk(i, "ssm_beta.weight"), r.v_heads, n_embd);
  const int64_t gate_rank = b.rows_of(b.blk(i, "ssm_g_a.weight"));
  r.gate_low = b.matrix(b.blk(i, "ssm_g_a.weight"), gate_rank, n_embd);
  r.gate = b.matrix(b.blk(i, "ssm_g_b.weight"), width, gate_rank);
  r.norm = b.vector(b.blk(i, "ssm_norm.weight"), r.dv);
  r.norm_rows = r.v_heads;
  r.output = b.matrix(b.blk(i, "attn_output.weight"), n_embd, width);
}

}  // namespace

void build_kimi_linear(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  RopeSpec rope = b.rope(/*neox=*/false, b.integer("rope.dimension_count", 2));
  rope.scaling = RopeScaling::still;
  const int64_t dense = b.integer_or("leading_dense_block_count", 0);
  const int64_t width = b.integer_or("expert_feed_forward_length", 0);
  const int64_t shared = b.integer_or("expert_shared_count", 0) * width;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    if (b.per_layer("attention.head_count_kv", i, std::nullopt) == 0) {
      delta_attention(b, layer, i);
    } else {
      latent_attention(b, layer, i, rope);
    }
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    if (i < dense) {
      b.dense_ffn(layer, i, b.feed_forward(i));
    } else {
      b.moe_ffn(layer, i, {.gating = ops::Gating::sigmoid, .normalize = true, .width = width, .shared_width = shared});
    }
  }
}

}  // namespace dyno::model
