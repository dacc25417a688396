// nemotron_h and nemotron_h_moe (Nemotron-H, Nemotron 3 Nano): a block has one sub-layer: Mamba-2, attention without
// rotation, or a feed-forward part with relu² and no gate, dense or with experts. The arrays of key-value heads and of
// feed-forward lengths determine the kind.
#include "model/builder.h"

namespace dyno::model {
namespace {

void feed_forward(Builder& b, LayerSpec& layer, int64_t i, int64_t width) {
  layer.ffn_norm = b.vector(b.blk(i, "attn_norm.weight"), b.model.n_embd);
  layer.ffn.activation = ops::Activation::relu;
  if (!b.has_tensor(b.blk(i, "ffn_gate_inp.weight"))) {
    b.dense_ffn(layer, i, width, /*gated=*/false);
    return;
  }
  DYNO_CHECK(UnsupportedError, !b.has_tensor(b.blk(i, "ffn_latent_down.weight")), "[model] tensor ",
             b.blk(i, "ffn_latent_down.weight"), ": experts behind a latent projection are not supported");
  b.moe_ffn(layer, i,
            {.gating = ops::Gating::sigmoid,
             .normalize = true,
             .width = b.integer_or("expert_feed_forward_length", width, 1),
             .shared_width = b.rows_of(b.blk(i, "ffn_up_shexp.weight")),
             .gated = false});
}

}  // namespace

void build_nemotron_h(Builder& b) {
  // Files have the norms' eps under one of two names.
  b.common({.eps = b.has_key("attention.layer_norm_epsilon") ? "attention.layer_norm_epsilon"
                                                             : "attention.layer_norm_rms_epsilon"});
  ModelDesc& m = b.model;
  RopeSpec rope = b.rope(/*neox=*/false);
  rope.scaling = RopeScaling::still;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    layer.ffn.kind = FfnKind::none;
    const int64_t width = b.per_layer("feed_forward_length", i, std::nullopt);
    if (b.per_layer("attention.head_count_kv", i, std::nullopt) > 0) {
      b.gqa(layer, i, rope);
    } else if (width > 0) {
      feed_forward(b, layer, i, width);
    } else {
      mamba2(b, layer, i);
    }
  }
}

}  // namespace dyno::model
