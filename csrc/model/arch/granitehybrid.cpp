// granitehybrid (Granite 4): Mamba-2 layers (arXiv:2405.21060) and attention layers without rotation; scaled
// embeddings, residuals and logits; experts chosen before the softmax with a shared expert, or a dense FFN.
#include "model/builder.h"

namespace dyno::model {

void mamba2(Builder& b, LayerSpec& layer, int64_t i) {
  const int64_t n_embd = b.model.n_embd;
  RecurrentSpec& r = layer.recurrent;
  r.kind = RecurrentKind::linear;
  r.rule = ops::LinearRule::additive;
  r.grouped = true;
  r.gate_first = true;
  r.taps = b.conv_taps("ssm.conv_kernel");
  r.k_heads = b.integer("ssm.group_count", 1);
  r.v_heads = b.integer("ssm.time_step_rank", 1);
  r.dk = b.integer("ssm.state_size", 1);
  const int64_t inner = b.integer("ssm.inner_size", 1);
  DYNO_CHECK(ModelError, r.v_heads % r.k_heads == 0 && inner % r.v_heads == 0, "[model] layer ", i, ": ", r.v_heads,
             " heads in ", r.k_heads, " groups and ", inner,
             " values; expected a whole number of heads per group and of values per head");
  r.dv = inner / r.v_heads;
  DYNO_CHECK(UnsupportedError, r.dk <= kMaxStateHead && r.dv <= kMaxStateHead, "[model] layer ", i, ": the state has ",
             r.dk, " dims and a head ", r.dv, "; at most ", kMaxStateHead, " are supported");
  const int64_t channels = inner + 2 * r.k_heads * r.dk;
  layer.attn_norm = b.vector(b.blk(i, "attn_norm.weight"), n_embd);
  r.in = b.matrix(b.blk(i, "ssm_in.weight"), inner + channels + r.v_heads, n_embd);
  r.conv = b.values(b.blk(i, "ssm_conv1d.weight"), r.taps * channels, r.taps);
  r.conv_bias = b.vector_optional(b.blk(i, "ssm_conv1d.bias"), channels);
  r.decay = b.values(b.blk(i, "ssm_a"), r.v_heads);
  r.skip = b.values(b.blk(i, "ssm_d"), r.v_heads);
  r.step_bias = b.vector(b.blk(i, "ssm_dt.bias"), r.v_heads);
  r.norm = b.values(b.blk(i, "ssm_norm.weight"), inner, inner / r.k_heads);
  r.norm_rows = r.k_heads;
  r.norm_shared = false;
  r.output = b.matrix(b.blk(i, "ssm_out.weight"), n_embd, inner);
}

void build_granitehybrid(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  m.embedding_scale = b.real_or("embedding_scale", 1.0);
  m.residual_scale = b.real_or("residual_scale", 1.0);
  const double divisor = b.real_or("logit_scale", 1.0);
  DYNO_CHECK(ModelError, divisor != 0, "[model] granitehybrid.logit_scale is 0; expected another number");
  m.logit_scale = 1.0 / divisor;
  const double attention_scale = b.real_or("attention.scale", 0);
  RopeSpec rope = b.rope(/*neox=*/false);
  // Despite the name of the key, false means that positions are not encoded at all.
  if (!b.flag_or("rope.scaling.finetuned", true)) rope.scaling = RopeScaling::still;
  const bool moe = b.integer_or("expert_count", 0) > 0;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    if (b.per_layer("attention.head_count_kv", i, std::nullopt) == 0) {
      mamba2(b, layer, i);
    } else {
      b.gqa(layer, i, rope);
      if (attention_scale > 0) layer.attention.scale = attention_scale;
    }
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    if (moe) {
      b.moe_ffn(layer, i,
                {.gating = ops::Gating::softmax_selected,
                 .width = b.integer_or("expert_feed_forward_length", b.feed_forward(i), 1),
                 .shared_width = b.rows_of(b.blk(i, "ffn_gate_shexp.weight"))});
    } else {
      b.dense_ffn(layer, i, b.feed_forward(i));
    }
  }
}

}  // namespace dyno::model
