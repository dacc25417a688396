// The op list for one token: the fused list, with gate and up of each shared expert in the launch of the other experts.
// With more tokens, that launch would read the shared weights once for each token.
#include <algorithm>

#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

using model::kNone;

// Whether `own`, which comes after `experts`, can join its launch.
bool can_join(const Nodes& nodes, size_t experts, size_t own) {
  const auto& pair = *operands_of<UpGateOperands>(nodes[own]);
  for (size_t between = experts; between < own; ++between) {
    const Node& node = nodes[between];
    if (writes(node, pair.x.value) || reads(node, pair.y.value) || writes(node, pair.y.value)) return false;
  }
  return true;
}

// Joins the launches of one layer. False: both stay.
bool join(const Plan& plan, const model::FfnSpec& f, Nodes& nodes, int32_t layer) {
  const Span span = layer_span(nodes, layer);
  const size_t at =
      find_node<MoeUpGateOperands>(nodes, span, [&](const auto& o) { return o.w_gate.id == f.experts_gate; });
  const size_t own = find_node<UpGateOperands>(nodes, span, [&](const auto& o) { return o.w_gate.id == f.gate; });
  if (at == span.end || own == span.end || own < at || nodes[at].divided) return false;
  const auto& pair = *operands_of<UpGateOperands>(nodes[own]);
  const auto& pair_desc = std::get<ops::UpGateDesc>(nodes[own].desc);
  MoeUpGateOperands& experts = *operands_of<MoeUpGateOperands>(nodes[at]);
  auto desc = std::get<ops::MoeUpGateDesc>(nodes[at].desc);
  const bool same_norm =
      desc.norm == pair_desc.norm && experts.norm.weight.id == pair.norm.weight.id && experts.norm.eps == pair.norm.eps;
  if (!alike(plan, f.gate, f.experts_gate) || !same_rows(pair.x, experts.x) || !same_norm ||
      desc.activation != pair_desc.activation || desc.act != pair_desc.act || desc.k != pair_desc.k ||
      pair.bias_gate.id != kNone || pair.bias_up.id != kNone || !can_join(nodes, at, own)) {
    return false;
  }
  desc.shared = pair_desc.n;
  if (!ops::takes_shared(desc, plan.device_of(f.gate))) return false;
  experts.shared_gate = pair.w_gate.id;
  experts.shared_up = pair.w_up.id;
  experts.shared_y = pair.y;
  nodes[at].desc = desc;
  nodes[at].beside = false;
  for (const size_t behind : {at + 1, own + 1}) {
    if (behind < nodes.size()) nodes[behind].beside = false;
  }
  nodes.erase(nodes.begin() + static_cast<std::ptrdiff_t>(own));
  return true;
}

}  // namespace

NodeList join_shared(Plan& plan, const model::ModelDesc& model, const NodeList& fused) {
  NodeList list = list_from(model, fused, ListId::single);
  bool gains = false;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const model::FfnSpec& f = model.layers[i].ffn;
    if (f.kind != model::FfnKind::moe || f.dense_width == 0 || f.gate == kNone || f.experts_gate == kNone) continue;
    gains |= join(plan, f, list.nodes, static_cast<int32_t>(i));
  }
  return gains ? list : NodeList{.id = ListId::single};
}

}  // namespace dyno::plan
