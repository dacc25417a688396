// olmo2 (OLMo 2 and 3): norms after attention and the feed-forward part instead of before them, norms over whole
// projections of queries and keys. OLMo 3 has sliding-window layers without rope scaling.
#include "model/builder.h"

namespace dyno::model {

void build_olmo2(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  const RopeSpec full = b.rope(/*neox=*/true);
  const int64_t window = b.integer_or("attention.sliding_window", 0);
  RopeSpec local = full;
  local.base = b.real_or("rope.freq_base_swa", full.base);
  local.scaling = RopeScaling::none;
  local.factor = local.attention_factor = 1.0;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    const bool is_local = window > 0 && b.is_local_layer(i, /*default_pattern=*/4);
    b.gqa(layer, i, is_local ? local : full, {.norm = false, .qk_norm = QkNorm::projection});
    b.require_qk_norm(layer, i);
    layer.attention.window = is_local ? window : 0;
    layer.attn_post_norm = b.vector(b.blk(i, "post_attention_norm.weight"), m.n_embd);
    b.dense_ffn(layer, i, b.feed_forward(i));
    layer.ffn_post_norm = b.vector(b.blk(i, "post_ffw_norm.weight"), m.n_embd);
  }
}

}  // namespace dyno::model
