// hunyuan-moe (Hunyuan A13B): norms of query and key heads after NEOX rope, softmax routing, shared expert.
#include "model/builder.h"

namespace dyno::model {

void build_hunyuan_moe(Builder& b) {
  b.common();
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t width = b.integer("expert_feed_forward_length", 1);
  for (int64_t i = 0; i < b.model.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    b.gqa(layer, i, rope, {.qk_norm = QkNorm::heads_after_rope});
    b.require_qk_norm(layer, i);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), b.model.n_embd);
    b.moe_ffn(layer, i,
              {.gating = ops::Gating::softmax,
               .normalize = true,
               .width = width,
               .shared_width = b.rows_of(b.blk(i, "ffn_gate_shexp.weight"))});
  }
}

}  // namespace dyno::model
