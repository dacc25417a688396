// ernie4_5-moe (ERNIE 4.5): softmax routing with a bias for the choice only (not for the weights), shared experts,
// leading dense layers.
#include "model/builder.h"

namespace dyno::model {

void build_ernie45moe(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  const RopeSpec rope = b.rope(/*neox=*/false);
  const int64_t dense = b.integer_or("leading_dense_block_count", 0);
  const int64_t width = b.integer("expert_feed_forward_length", 1);
  const int64_t step = b.integer_or("interleave_moe_layer_step", 1, 1);
  DYNO_CHECK(UnsupportedError, step == 1, "[model] ", m.architecture, ".interleave_moe_layer_step is ", step,
             "; supported: 1, experts in every layer after the dense ones");
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    if (i < dense) {
      b.dense_ffn(layer, i, b.feed_forward(i));
    } else {
      // Converters derive expert_shared_feed_forward_length from other keys; the tensor's shape is correct.
      b.moe_ffn(layer, i,
                {.gating = ops::Gating::softmax,
                 .normalize = true,
                 .width = width,
                 .shared_width = b.rows_of(b.blk(i, "ffn_gate_shexp.weight"))});
    }
  }
}

}  // namespace dyno::model
