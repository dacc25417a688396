// The op list for some dozens of tokens, a step of a server: the general one, in which what lies between products is
// fused. There a launch costs as much as its work, and the products want tiles that the fused list does not have.
#include "plan/passes/passes.h"

#include "core/error.h"

namespace dyno::plan {
namespace {

// Whether the default for any number of tokens of this list reads the weights once: streamed, it would for every 8.
bool has_ring(const DeviceInfo& device, const ops::QkvDesc& desc) {
  for (const int64_t tokens : {kFusedTokens + 1, int64_t{32}, kBatchedTokens}) {
    const ops::OpDesc d = ops::with_tokens(desc, tokens);
    const ops::Config config = ops::default_config(d, device);
    if (ops::variants(ops::Family::qkv)[config.variant].name != "wgmma_ring") return false;
  }
  return true;
}

// q, k and v of weights of one type in one launch, for which their rows become halves once.
bool merge_products(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t i) {
  const model::AttentionSpec& a = model.layers[static_cast<size_t>(i)].attention;
  if (a.kind == model::AttentionKind::mla || a.qkv != model::kNone) return false;
  const auto layout = [&](model::WeightId w) { return plan.weights[static_cast<size_t>(w)].layout; };
  const model::Weight &w_q = model.weight(a.q), &w_k = model.weight(a.k), &w_v = model.weight(a.v);
  if (layout(a.k) != layout(a.q) || layout(a.v) != layout(a.q) || !stand_together(plan, {a.q, a.k, a.v})) return false;
  const ops::QkvDesc desc{.type = w_q.type,
                          .type_k = w_k.type,
                          .type_v = w_v.type,
                          .layout = layout(a.q),
                          .n = w_q.rows,
                          .n_k = w_k.rows,
                          .n_v = w_v.rows,
                          .k = w_q.cols};
  const DeviceInfo& device = plan.device_of(a.q);
  if (!fused_takes(device, desc, {kFusedTokens + 1, kBatchedTokens}) || !has_ring(device, desc)) return false;
  const size_t at =
      find_node<MatmulOperands>(nodes, layer_span(nodes, i), [&](const MatmulOperands& o) { return o.w.id == a.q; });
  const auto& q = *operands_of<MatmulOperands>(nodes[at]);
  const auto& k = *operands_of<MatmulOperands>(nodes[at + 1]);
  const auto& v = *operands_of<MatmulOperands>(nodes[at + 2]);
  replace_nodes(nodes, {at, at + 3},
                make_node(str_cat("blk.", i, ".attn_qkv"), i, desc,
                          {.x = q.x,
                           .w_q = q.w,
                           .w_k = k.w,
                           .w_v = v.w.id,
                           .bias_q = q.bias,
                           .bias_k = k.bias,
                           .bias_v = v.bias,
                           .q = q.y,
                           .k = k.y,
                           .v = v.y}));
  return true;
}

}  // namespace

NodeList batch(Plan& plan, const model::ModelDesc& model, const NodeList& general) {
  NodeList list{.id = ListId::batched, .nodes = general.nodes, .residual = general.residual};
  bool gains = false;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    if (!has_plain_attention(model.layers[i])) continue;
    gains |= merge_products(plan, model, list.nodes, static_cast<int32_t>(i));
    gains |= fuse_stores(plan, model, list.nodes, static_cast<int32_t>(i));
  }
  return gains ? list : NodeList{.id = ListId::batched};
}

}  // namespace dyno::plan
