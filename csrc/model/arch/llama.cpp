// llama: Llama 2/3 and models of the same shape (Mistral; Mixtral with experts).
#include "model/builder.h"

namespace dyno::model {

void build_llama(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/false);
  const bool moe = b.integer_or("expert_count", 0) > 0;
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    if (moe) {
      b.moe_ffn(layer, i, {.gating = ops::Gating::softmax, .normalize = true, .width = b.feed_forward(i)});
    } else {
      b.dense_ffn(layer, i, b.feed_forward(i));
    }
  }
}

}  // namespace dyno::model
