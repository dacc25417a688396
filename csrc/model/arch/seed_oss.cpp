// seed_oss (Seed-OSS): NEOX rope, biases on q, k and v, and a head size that does not follow from the embedding size.
#include "model/builder.h"

namespace dyno::model {

void build_seed_oss(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/true);
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    // The file uses this name for the norm before the feed-forward part.
    layer.ffn_norm = b.vector(b.blk(i, "post_attention_norm.weight"), b.model.n_embd);
    b.dense_ffn(layer, i, b.feed_forward(i));
  }
}

}  // namespace dyno::model
