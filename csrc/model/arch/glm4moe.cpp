// glm4moe (GLM-4.5): partial NEOX rope, q/k/v biases, optional q/k norms, sigmoid gating with a selection bias, shared
// expert, leading dense layers. The last block predicts a further token.
#include "model/builder.h"

namespace dyno::model {

void build_glm4moe(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t dense = b.integer_or("leading_dense_block_count", 0);
  const int64_t width = b.integer("expert_feed_forward_length", 1);
  const int64_t shared = b.integer_or("expert_shared_count", 0) * width;

  for (const auto& [layer, i] : b.blocks()) {
    b.gqa(layer, i, rope);
    layer.ffn_norm = b.vector(b.blk(i, "post_attention_norm.weight"), m.n_embd);
    if (i < dense) {
      b.dense_ffn(layer, i, b.feed_forward(i));
    } else {
      b.moe_ffn(layer, i, {.gating = ops::Gating::sigmoid, .normalize = true, .width = width, .shared_width = shared});
    }
  }
}

}  // namespace dyno::model
