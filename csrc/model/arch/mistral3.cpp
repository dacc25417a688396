// mistral3 (Mistral 3, Ministral 3): llama's layer with YaRN, and queries that grow with the logarithm of their
// position beyond the original context. With experts it is Mixtral's layer.
#include "model/builder.h"

namespace dyno::model {

void build_mistral3(Builder& b) {
  b.common();
  RopeSpec rope = b.rope(/*neox=*/false);
  // A multiplier means that the file's two magnitudes are equal, so their quotient, which scales cos and sin, is 1.
  if (b.real_or("rope.scaling.yarn_log_multiplier", 0) != 0) rope.yarn_scales_cos_sin = false;
  rope.position_scale = b.real_or("attention.temperature_scale", 0);
  if (rope.position_scale != 0) rope.position_step = b.integer("rope.scaling.original_context_length", 1);
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
