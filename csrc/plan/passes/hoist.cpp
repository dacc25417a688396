// Devices take turns in the order of the list. A node that does not depend on another device's turn moves before it, to
// the last turn of its own device. So transfers to another device are issued together, and a GPU has work while the CPU
// computes. Nodes stay within their layer and never pass a node that uses the cache or the state of sequences.
#include <algorithm>

#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

bool touches(const Node& node, ValueId value, bool writing) {
  bool found = false;
  for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
    found |= operand && operand.value == value && (!writing || operand.kUse != Access::read);
  });
  return found;
}

// Whether two nodes must keep their order.
bool depend(const Node& node, const Node& other) {
  bool found = false;
  for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
    found |= operand && touches(other, operand.value, operand.kUse == Access::read);
  });
  return found;
}

bool is_transfer(const Node& node) { return operands_of<TransferOperands>(node) != nullptr; }

bool stays(const Node& node) { return node.per_run || mixes_tokens(node) || changes_memory(node); }

// The device that a node waits for; for a transfer, the source of its value.
DeviceId waits_for(const Plan& plan, const Node& node) {
  const auto* moved = operands_of<TransferOperands>(node);
  return moved == nullptr ? node.device : plan.values[static_cast<size_t>(moved->x.value)].device;
}

// The new index of node i: after the last node of its device before another device's turn; i if it has to stay.
size_t place_of(const Plan& plan, const Nodes& nodes, size_t i, bool streamed) {
  const Node& node = nodes[i];
  if (stays(node) || node.beside) return i;
  // A virtual main device computes only in its turn, and its link copies while the CPU computes.
  if (node.divided && streamed && plan.main_device().kind == DeviceKind::cpu) return i;
  const DeviceId device = waits_for(plan, node);
  bool passed = false;
  for (size_t at = i; at > 0; --at) {
    const Node& before = nodes[at - 1];
    const bool same = waits_for(plan, before) == device;
    if (same && passed) return at;
    if (before.layer != node.layer || stays(before) || depend(node, before)) return i;
    // A transfer directly follows the other transfers of its source. Other nodes may pass their neighbours.
    if (same && is_transfer(node)) return i;
    passed |= !same;
  }
  return i;
}

}  // namespace

void hoist(Plan& plan, NodeList& list) {
  Nodes& nodes = list.nodes;
  for (size_t i = 1; i < nodes.size(); ++i) {
    const size_t to = place_of(plan, nodes, i, is_streamed(list.id));
    if (to == i) continue;
    if (i + 1 < nodes.size()) nodes[i + 1].beside = false;
    nodes[to].beside = false;
    const auto begin = nodes.begin();
    std::rotate(begin + static_cast<std::ptrdiff_t>(to), begin + static_cast<std::ptrdiff_t>(i),
                begin + static_cast<std::ptrdiff_t>(i) + 1);
  }
}

}  // namespace dyno::plan
