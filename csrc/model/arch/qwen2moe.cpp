// qwen2moe (Qwen1.5 and 2 with experts): qwen2's attention, softmax routing without normalised weights, and a shared
// expert with a gate.
#include "model/builder.h"

namespace dyno::model {

void build_qwen2moe(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t width = b.integer("expert_feed_forward_length", 1);
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    b.moe_ffn(layer, i,
              {.gating = ops::Gating::softmax,
               .normalize = false,
               .width = width,
               .shared_width = b.rows_of(b.blk(i, "ffn_gate_shexp.weight"))});
  }
}

}  // namespace dyno::model
