// Memory of the copies of streamed weights on the main device, and the nodes that need them.
#include <algorithm>
#include <map>
#include <type_traits>

#include "core/checked.h"
#include "core/error.h"
#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

constexpr size_t kAlignment = 256;

// The weights of a node that are copies, and the value that chooses among their experts.
Fetch fetch_of(const Plan& plan, const Node& node) {
  Fetch fetch;
  std::visit(
      [&]<typename O>(const O& o) {
        for_each_field<O>([&](std::string_view name, auto member) {
          const auto& field = o.*member;
          using Field = std::remove_cvref_t<decltype(field)>;
          if constexpr (IsWeight<Field>) {
            if (field.id != model::kNone && plan.streams(ListId::streamed, field.id)) fetch.weights.push_back(field.id);
          } else if constexpr (IsOperand<Field>) {
            if (name == "ids" && Field::kUse == Access::read) fetch.ids = field.value;  // not the op that chooses them
          }
        });
      },
      node.operands);
  std::visit(
      [&](const auto& d) {
        if constexpr (requires { d.experts; }) {
          fetch.experts = d.experts;
          fetch.used = d.used;
        }
      },
      node.desc);
  return fetch;
}

// Finds the fetches of a list, and places the copies. Layers take turns in the two halves of the memory for copies.
void stream_list(Plan& plan, NodeList& list) {
  list.fetches.clear();
  PlannedDevice& main = plan.devices.front();
  main.stream_bytes = 0;
  std::map<int32_t, int32_t> orders;  // order by layer
  std::map<int32_t, size_t> taken;    // bytes by layer
  for (size_t i = 0; i < list.nodes.size(); ++i) {
    const Node& node = list.nodes[i];
    if (node.device != kMainDevice) continue;
    Fetch fetch = fetch_of(plan, node);
    const auto* split = operands_of<MoeSplitOperands>(node);
    if (split != nullptr && plan.is_shared_table(split->place_table)) fetch.shared_layer = node.layer;
    if (fetch.weights.empty() && fetch.shared_layer < 0) continue;
    fetch.node = static_cast<int32_t>(i);
    fetch.order = orders.try_emplace(node.layer, static_cast<int32_t>(orders.size())).first->second;
    for (const model::WeightId id : fetch.weights) {
      StreamedWeight& weight = plan.weights[static_cast<size_t>(id)].stream;
      weight.offset = taken[node.layer];
      taken[node.layer] =
          checked_add(weight.offset, checked_align(weight.bytes, kAlignment, "streamed weights"), "streamed weights");
    }
    list.fetches.push_back(std::move(fetch));
  }
  size_t half = 0;
  for (const auto& [layer, bytes] : taken) half = std::max(half, bytes);
  for (const Fetch& fetch : list.fetches) {
    if (fetch.order % 2 == 0) continue;
    for (const model::WeightId id : fetch.weights) plan.weights[static_cast<size_t>(id)].stream.offset += half;
  }
  main.stream_bytes = checked_add(checked_mul(half, orders.size() > 1 ? 2 : 1, "streamed weights"),
                                  checked_mul(kStages, plan.stage_bytes(), "streamed weights"), "streamed weights");
}

std::vector<size_t> offsets_of(const Plan& plan) {
  std::vector<size_t> offsets;
  for (const WeightPlacement& weight : plan.weights) offsets.push_back(weight.stream.offset);
  return offsets;
}

}  // namespace

void stream(Plan& plan) {
  stream_list(plan, plan.streamed);
  if (plan.streamed_expanded.nodes.empty()) return;
  // A copy that one list has made serves the other, so both must have it at the same place.
  const std::vector<size_t> offsets = offsets_of(plan);
  stream_list(plan, plan.streamed_expanded);
  DYNO_CHECK(PlanError, offsets_of(plan) == offsets,
             "[plan] the two lists for prompts copy weights to different places");
}

}  // namespace dyno::plan
