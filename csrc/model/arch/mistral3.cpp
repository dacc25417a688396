// mistral3 (Mistral 3, Ministral 3): llama's layer with YaRN, and queries that grow with the logarithm of their
// position beyond the original context. With experts it is Mixtral's layer.
#include <cmath>

#include "model/builder.h"

namespace dyno::model {

void build_mistral3(Builder& b) {
  b.common();
  RopeSpec rope = b.rope(/*neox=*/false);
  // Cos and sin grow by the quotient of two magnitudes. YaRN's own is the first, the file has the second.
  if (rope.scaling == RopeScaling::yarn) {
    const double second = b.real_or("rope.scaling.yarn_log_multiplier", 0);
    DYNO_CHECK(ModelError, second >= 0, "[model] ", b.key("rope.scaling.yarn_log_multiplier"), " is ", second,
               "; expected 0 or more");
    rope.attention_factor /= 1.0 + 0.1 * second * std::log(rope.factor);
  }
  rope.position_scale = b.real_or("attention.temperature_scale", 0);
  if (rope.position_scale != 0) {
    rope.position_step = b.integer_or("rope.scaling.original_context_length", b.model.n_ctx_train, 1);
  }
  const bool moe = b.integer_or("expert_count", 0) > 0;
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    // The factor of cos and sin applies only to the rotated elements.
    DYNO_CHECK(UnsupportedError, rope.position_scale == 0 || rope.n_rot == layer.attention.dk,
               "[model] attention.temperature_scale is set, but only ", rope.n_rot, " of the ", layer.attention.dk,
               " elements of a head rotate; supported: all rotate");
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    if (moe) {
      b.moe_ffn(layer, i, {.gating = ops::Gating::softmax, .normalize = true, .width = b.feed_forward(i)});
    } else {
      b.dense_ffn(layer, i, b.feed_forward(i));
    }
  }
}

}  // namespace dyno::model
