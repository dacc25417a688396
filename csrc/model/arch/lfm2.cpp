// lfm2 and lfm2moe (LFM2): gated short convolutions, with attention layers with q/k norms between them. lfm2moe has
// leading dense layers and sigmoid gating with a selection bias. The final norm is named token_embd_norm.
#include "model/builder.h"

namespace dyno::model {
namespace {

void short_convolution(Builder& b, LayerSpec& layer, int64_t i) {
  const int64_t n_embd = b.model.n_embd;
  RecurrentSpec& r = layer.recurrent;
  r.kind = RecurrentKind::short_conv;
  r.taps = b.conv_taps("shortconv.l_cache");
  layer.attn_norm = b.vector(b.blk(i, "attn_norm.weight"), n_embd);
  r.in = b.matrix(b.blk(i, "shortconv.in_proj.weight"), 3 * n_embd, n_embd);
  r.conv = b.values(b.blk(i, "shortconv.conv.weight"), r.taps * n_embd, r.taps);
  r.output = b.matrix(b.blk(i, "shortconv.out_proj.weight"), n_embd, n_embd);
}

}  // namespace

void build_lfm2(Builder& b) {
  b.common({.output_norm = b.has_tensor("token_embd_norm.weight") ? "token_embd_norm.weight" : "output_norm.weight"});
  ModelDesc& m = b.model;
  const RopeSpec rope = b.rope(/*neox=*/true);
  const int64_t window = b.integer_or("attention.sliding_window", 0);
  const bool moe = b.has_key("expert_count");
  const int64_t dense = moe ? b.integer_or("leading_dense_block_count", 0) : m.n_layers;
  for (int64_t i = 0; i < m.n_layers; ++i) {
    LayerSpec& layer = b.layer(i);
    if (b.per_layer("attention.head_count_kv", i, std::nullopt) == 0) {
      short_convolution(b, layer, i);
    } else {
      b.gqa(layer, i, rope);
      b.require_qk_norm(layer, i);
      layer.attention.window = window;
    }
    layer.ffn_norm = b.vector(b.blk(i, "ffn_norm.weight"), m.n_embd);
    if (i < dense) {
      b.dense_ffn(layer, i, b.feed_forward(i));
    } else {
      b.moe_ffn(
          layer, i,
          {.gating = ops::Gating::sigmoid, .normalize = true, .width = b.integer("expert_feed_forward_length", 1)});
    }
  }
}

}  // namespace dyno::model
