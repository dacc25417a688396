// bailingmoe2 (Ling 2.0, Ring 2.0): fused qkv, q/k norms, partial NEOX rope, group-limited sigmoid routing with a
// selection bias, shared expert, leading dense layers. Next-token blocks are not decoded.
#include "model/builder.h"

namespace dyno::model {

void build_bailingmoe2(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t dense = b.integer_or("leading_dense_block_count", 0);
  const int64_t width = b.integer("expert_feed_forward_length", 1);
  const int64_t shared =
      b.integer_or("expert_shared_count", 0) * b.integer_or("expert_shared_feed_forward_length", width);

  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    b.require_qk_norm(layer, i);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    if (i < dense) {
      b.dense_ffn(layer, i, b.feed_forward(i));
    } else {
      b.moe_ffn(layer, i, {.gating = ops::Gating::sigmoid, .normalize = true, .width = width, .shared_width = shared});
    }
  }
}

}  // namespace dyno::model
