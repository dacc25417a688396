// gpt-oss: attention sinks, sliding window on even layers, biases everywhere, YaRN; top-k on the biased router logits,
// softmax over the selected, clamped SwiGLU.
#include "model/builder.h"

namespace dyno::model {

void build_gpt_oss(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  const RopeSpec full = b.rope(/*neox=*/true);
  RopeSpec local = full;
  local.base = b.real_or("rope.freq_base_swa", full.base);
  const int64_t window = b.integer_or("attention.sliding_window", 0);
  const int64_t width = b.integer_or("expert_feed_forward_length", b.integer_or("feed_forward_length", 0), 1);

  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    const bool is_local = window > 0 && b.is_local_layer(i, /*default_pattern=*/2);
    b.gqa(layer, i, is_local ? local : full);
    layer.attention.window = is_local ? window : 0;
    layer.attention.sinks = b.vector(b.blk(i, "attn_sinks.weight"), layer.attention.heads);
    layer.ffn_norm = b.vector(b.blk(i, "post_attention_norm.weight"), m.n_embd);
    b.moe_ffn(layer, i, {.gating = ops::Gating::softmax_selected, .normalize = false, .width = width});
    layer.ffn.activation = ops::Activation::swiglu_oai;
  }
}

}  // namespace dyno::model
