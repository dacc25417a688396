// qwen35, qwen35moe and qwen3next (Qwen3.5, Qwen3-Next): layers of the gated delta rule (arXiv:2412.06464) after a
// short convolution, and between them layers of full attention with a gate on the output and partial rotation. qwen35
// is dense; the others have experts and a gated shared expert. qwen3next orders value heads by their key head and
// stores the products of beta and step in one tensor. The block after the trunk predicts a further token.
#include "model/builder.h"

namespace dyno::model {
namespace {

void delta_rule(Builder& b, LayerSpec& layer, int64_t i, bool grouped) {
  const int64_t n_embd = b.model.n_embd;
  RecurrentSpec& r = layer.recurrent;
  r.kind = RecurrentKind::linear;
  r.grouped = grouped;
  r.taps = b.conv_taps("ssm.conv_kernel");
  r.k_heads = b.integer("ssm.group_count", 1);
  r.v_heads = b.integer("ssm.time_step_rank", 1);
  r.dk = b.integer("ssm.state_size", 1);
  const int64_t inner = b.integer("ssm.inner_size", 1);
  DYNO_CHECK(ModelError, r.v_heads % r.k_heads == 0 && inner % r.v_heads == 0, "[model] layer ", i, ": ", r.v_heads,
             " value heads, ", r.k_heads, " key heads and ", inner,
             " values; expected whole numbers of value heads per key head and of values per value head");
  r.dv = inner / r.v_heads;
  DYNO_CHECK(UnsupportedError, r.dk <= kMaxStateHead && r.dv <= kMaxStateHead, "[model] layer ", i, ": a key head has ",
             r.dk, " dims and a value head ", r.dv, "; at most ", kMaxStateHead, " are supported");
  const int64_t channels = 2 * r.k_heads * r.dk + inner;
  layer.attn_norm = b.vector(b.blk(i, "attn_norm.weight"), n_embd);
  r.in = b.matrix(b.blk(i, "attn_qkv.weight"), channels, n_embd);
  r.gate = b.matrix(b.blk(i, "attn_gate.weight"), inner, n_embd);
  r.conv = b.values(b.blk(i, "ssm_conv1d.weight"), r.taps * channels, r.taps);
  if (const std::string both = b.blk(i, "ssm_ba.weight"); b.has_tensor(both)) {
    r.beta = b.half(both, /*second=*/false, r.k_heads, r.v_heads / r.k_heads, n_embd);
    r.step = b.half(both, /*second=*/true, r.k_heads, r.v_heads / r.k_heads, n_embd);
  } else {
    r.beta = b.matrix(b.blk(i, "ssm_beta.weight"), r.v_heads, n_embd);
    r.step = b.matrix(b.blk(i, "ssm_alpha.weight"), r.v_heads, n_embd);
  }
  r.decay = b.vector(b.blk(i, "ssm_a"), r.v_heads);
  r.step_bias = b.vector(b.blk(i, "ssm_dt.bias"), r.v_heads);
  r.norm = b.vector(b.blk(i, "ssm_norm.weight"), r.dv);
  r.norm_rows = r.v_heads;
  r.output = b.matrix(b.blk(i, "ssm_out.weight"), n_embd, inner);
}

}  // namespace

void build_qwen35(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t interval = b.integer_or("full_attention_interval", 4, 1);
  const bool moe = b.has_key("expert_count");
  for (const auto& [layer, i] : b.blocks()) {
    // The block of a draft head has full attention.
    if (!b.is_head() && b.layer_flag("attention.recurrent_layers", i).value_or((i + 1) % interval != 0)) {
      delta_rule(b, layer, i, /*grouped=*/m.architecture == "qwen3next");
    } else {
      b.gqa(layer, i, rope, {.gated = true});
      b.require_qk_norm(layer, i);
    }
    layer.ffn_norm = b.vector(b.blk(i, "post_attention_norm.weight"), m.n_embd);
    if (!moe) {
      b.dense_ffn(layer, i, b.feed_forward(i));
      continue;
    }
    b.moe_ffn(layer, i,
              {.gating = ops::Gating::softmax,
               .normalize = true,
               .width = b.integer("expert_feed_forward_length", 1),
               .shared_width = b.rows_of(b.blk(i, "ffn_gate_shexp.weight"))});
  }
}

}  // namespace dyno::model
