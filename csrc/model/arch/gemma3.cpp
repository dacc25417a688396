// gemma3: scaled embeddings, four norms per layer, q/k norms, five sliding-window layers for each global layer, which
// has its own rope base and linear scaling; GELU, tied output.
#include <cmath>

#include "model/builder.h"

namespace dyno::model {

void build_gemma3(Builder& b) {
  b.common();
  ModelDesc& m = b.model;
  m.embedding_scale = std::sqrt(static_cast<double>(m.n_embd));
  m.logit_softcap = b.real_or("final_logit_softcapping", 0);

  const int64_t window = b.integer_or("attention.sliding_window", 0);
  const RopeSpec global = b.rope(/*neox=*/true);
  RopeSpec local = global;
  local.base = b.real_or("rope.freq_base_swa", 10000.0);
  local.scaling = RopeScaling::none;
  local.factor = 1.0;
  // The 27B model (62 layers) scales queries by its residual width per head instead of the head size.
  const bool wide_scale = m.n_layers == 62;

  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    const bool is_local = window > 0 && b.is_local_layer(i, /*default_pattern=*/6);
    b.gqa(layer, i, is_local ? local : global);
    b.require_qk_norm(layer, i);
    AttentionSpec& a = layer.attention;
    a.window = is_local ? window : 0;
    if (wide_scale) a.scale = 1.0 / std::sqrt(static_cast<double>(m.n_embd) / static_cast<double>(a.heads));
    layer.attn_post_norm = b.vector(b.blk(i, "post_attention_norm.weight"), m.n_embd);
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    b.dense_ffn(layer, i, b.feed_forward(i));
    layer.ffn.activation = ops::Activation::gelu_tanh;
    layer.ffn_post_norm = b.vector(b.blk(i, "post_ffw_norm.weight"), m.n_embd);
  }
}

}  // namespace dyno::model
