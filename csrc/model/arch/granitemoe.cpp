// granitemoe: llama's attention with its own scale; scaled embeddings, residuals and logits; softmax gating
// renormalised; optional shared expert.
#include "model/builder.h"

namespace dyno::model {

void build_granitemoe(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  m.embedding_scale = b.real_or("embedding_scale", 1.0);
  m.residual_scale = b.real_or("residual_scale", 1.0);
  const double divisor = b.real("logit_scale");
  DYNO_CHECK(ModelError, divisor != 0, "[model] ", m.architecture, ".logit_scale is 0; expected another number");
  m.logit_scale = 1.0 / divisor;
  const double attention_scale = b.real_or("attention.scale", 0);
  const RopeSpec rope = b.rope(/*neox=*/false);
  const int64_t shared = b.integer_or("expert_shared_feed_forward_length", 0);

  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope);
    if (attention_scale != 0) layer.attention.scale = attention_scale;
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    b.moe_ffn(layer, i,
              {.gating = ops::Gating::softmax, .normalize = true, .width = b.feed_forward(i), .shared_width = shared});
  }
}

}  // namespace dyno::model
