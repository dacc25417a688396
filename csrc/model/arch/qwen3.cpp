// qwen3: NEOX rope after an RMS norm over each q and k head; no biases.
#include "model/builder.h"

namespace dyno::model {

void build_qwen3(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/true);
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    b.require_qk_norm(layer, i);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    b.dense_ffn(layer, i, b.feed_forward(i));
  }
}

}  // namespace dyno::model
