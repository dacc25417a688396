// qwen3moe: qwen3's attention; softmax gating over all experts with renormalised weights of the selected ones; no
// shared expert.
#include "model/builder.h"

namespace dyno::model {

void build_qwen3moe(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t used = b.integer("expert_used_count", 1);
  const int64_t width = b.integer_or("expert_feed_forward_length", b.integer_or("feed_forward_length", 0) / used, 1);
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    b.require_qk_norm(layer, i);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    b.moe_ffn(layer, i, {.gating = ops::Gating::softmax, .normalize = true, .width = width});
  }
}

}  // namespace dyno::model
