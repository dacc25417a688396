// smollm3: llama's layer with a tied output; every fourth layer does not rotate.
#include "model/builder.h"

namespace dyno::model {

void build_smollm3(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/false);
  RopeSpec still = rope;
  still.scaling = RopeScaling::still;
  constexpr int64_t kStep = 4;  // not in the metadata
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, (i + 1) % kStep == 0 ? still : rope);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    b.dense_ffn(layer, i, b.feed_forward(i));
  }
}

}  // namespace dyno::model
