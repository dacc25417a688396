// muse-glimmer: an RMS norm without weights on the embedding, four norms a layer, q/k norms, a gate on attention's
// output; sliding-window layers rotate, full ones do not. Logits are scaled and capped.
#include "model/builder.h"

namespace dyno::model {

void build_muse_glimmer(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  m.embedding_norm = true;
  m.post_norm_eps = 1e-8;  // not in the metadata
  m.logit_scale = b.real_or("logit_scale", 1.0);
  m.logit_softcap = b.real_or("final_logit_softcapping", 0);
  const int64_t window = b.integer("attention.sliding_window", 1);
  const RopeSpec rope = b.rope(/*neox=*/false);
  RopeSpec still = rope;
  still.scaling = RopeScaling::still;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    const bool is_local = b.is_local_layer(i, /*default_pattern=*/4);
    b.gqa(layer, i, is_local ? rope : still);
    b.require_qk_norm(layer, i);
    AttentionSpec& a = layer.attention;
    a.window = is_local ? window : 0;
    a.gate = b.matrix(b.blk(i, "attn_gate.weight"), a.heads * a.dv, m.n_embd);
    layer.attn_post_norm = b.vector(b.blk(i, "post_attention_norm.weight"), m.n_embd);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    b.dense_ffn(layer, i, b.feed_forward(i));
    layer.ffn_post_norm = b.vector(b.blk(i, "post_ffw_norm.weight"), m.n_embd);
  }
}

}  // namespace dyno::model
