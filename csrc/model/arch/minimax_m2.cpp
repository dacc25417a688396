// minimax-m2: norms over whole projections of queries and keys, partial NEOX rope, experts in every layer with sigmoid
// gating and a selection bias.
#include "model/builder.h"

namespace dyno::model {

void build_minimax_m2(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t width = b.integer("expert_feed_forward_length", 1);
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope, {.qk_norm = QkNorm::projection});
    b.require_qk_norm(layer, i);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    b.moe_ffn(layer, i, {.gating = ops::Gating::sigmoid, .normalize = true, .width = width});
  }
}

}  // namespace dyno::model
