// The op list for prompts and for the steps of many sequences: the general list with the ops between products fused.
// The products need tiles that the fused list does not have.
#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

// Whether the defaults read the weights once, in every bucket of this list. The streaming kernel reads them once for
// every 8 tokens.
bool reads_once(const DeviceInfo& device, const ops::OpDesc& desc) {
  const auto taken = [&](int64_t tokens) {
    const ops::OpDesc d = ops::with_tokens(desc, tokens);
    const ops::Config config = ops::default_config(d, device);
    if (!ops::supports(d, config, device)) return false;
    const std::string_view name = ops::variants(ops::family_of(d))[config.variant].name;
    const bool ring = name == "wgmma_ring" || name == "wgmma_codes";
    return ring || (tokens > kRingTokens && name.starts_with("wgmma"));
  };
  for (int64_t tokens = 2 * kFusedTokens; tokens <= kBatchedTokens; tokens *= 2) {
    if (!taken(tokens)) return false;
  }
  return taken(kFusedTokens + 1);
}

// q, k and v, or the first products of latent attention, in one launch, which converts their rows to f16 once.
bool merge_products(const Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t i) {
  const model::AttentionSpec& a = model.layers[static_cast<size_t>(i)].attention;
  const bool latents = a.kind == model::AttentionKind::mla;
  const model::WeightId first = latents && a.q_a != model::kNone ? a.q_a : a.q;
  const std::optional<ops::QkvDesc> desc = latents ? pair_desc(plan, model, first, a.kv_a) : qkv_desc(plan, model, a);
  if (!desc) return false;
  const DeviceInfo& device = plan.device_of(first);
  if (!fused_takes(device, *desc, {kFusedTokens + 1, kBatchedTokens}) || !reads_once(device, *desc)) return false;
  if (latents) {
    merge_pair(nodes, i, first, "_and_kv_a", *desc);
  } else {
    merge_qkv(nodes, i, a, *desc);
  }
  return true;
}

// The launch that converts rows of x to f16 also normalises them, if one product reads them.
bool norms_rows(const Plan& plan, Node& node, const NormOperands& norm) {
  model::WeightId w = model::kNone;
  if (const auto* up_gate = operands_of<UpGateOperands>(node)) w = up_gate->w_gate.id;
  if (const auto* qkv = operands_of<QkvOperands>(node)) w = qkv->w_q.id;
  if (w == model::kNone || !stand_together(plan, {w, norm.weight.id})) return false;
  Node normed = node;
  norm_inside(normed, norm);
  const DeviceInfo& device = plan.device_of(w);
  if (device.kind != DeviceKind::cuda || !reads_once(device, normed.desc)) return false;
  node = normed;
  return true;
}

}  // namespace

NodeList batch(Plan& plan, const model::ModelDesc& model, const NodeList& general) {
  NodeList list = list_from(model, general, ListId::batched);
  bool gains = false;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    if (!has_plain_attention(model.layers[i])) continue;
    gains |= merge_products(plan, model, list.nodes, static_cast<int32_t>(i));
    gains |= fuse_stores(plan, model, list.nodes, static_cast<int32_t>(i));
  }
  if (gains) {
    fold_norms(list.nodes, [&](Node& node, const NormOperands& norm) { return norms_rows(plan, node, norm); });
  }
  return gains ? list : NodeList{.id = ListId::batched};
}

}  // namespace dyno::plan
