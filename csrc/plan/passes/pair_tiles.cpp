// Finds ops that may write their rows as the f16 tiles that the next product reads, which saves the launch that would
// convert them. The selection, which knows the kernels of both ops, decides whether they do.
#include <algorithm>
#include <optional>

#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

// Whether the operand covers whole, contiguous rows of `columns` floats.
bool whole(const Plan& plan, const Operand& operand, int64_t columns) {
  const auto bytes = static_cast<int64_t>(columns * sizeof(float));
  return operand && operand.offset_bytes == 0 && operand.stride_bytes == bytes &&
         plan.values[static_cast<size_t>(operand.value)].bytes_per_token == static_cast<size_t>(bytes);
}

// The rows of a node that can be written as tiles.
std::optional<ValueId> rows_of(const Plan& plan, const Node& node) {
  Operand rows;
  int64_t columns = 0;
  if (const auto* up_gate = operands_of<UpGateOperands>(node)) {
    rows = up_gate->y, columns = std::get<ops::UpGateDesc>(node.desc).n;
  } else if (const auto* attention = operands_of<AttentionOperands>(node)) {
    const auto& desc = std::get<ops::AttentionDesc>(node.desc);
    rows = attention->out, columns = desc.heads * desc.dv;
  }
  if (!whole(plan, rows, columns)) return std::nullopt;
  return rows.value;
}

int uses_of(const NodeList& list, ValueId value) {
  int uses = 0;
  for (const Node& node : list.nodes) {
    for_each_operand(node.operands, [&](std::string_view, const Operand& operand) { uses += operand.value == value; });
  }
  return uses;
}

// Whether rows are dropped between the two nodes because nobody wants their logits. This moves float32 rows.
bool selects_between(const NodeList& list, int32_t from, int32_t to) {
  return (from <= list.select_node && list.select_node < to) || (from < list.head_node && list.head_node <= to);
}

// The index of the passing. Rows of one list with one width have the same memory.
int32_t passing_of(Plan& plan, int32_t from, int32_t to, ValueId value) {
  const auto list_of = [&](ValueId id) { return plan.values[static_cast<size_t>(id)].list; };
  const auto known = std::find_if(plan.passings.begin(), plan.passings.end(), [&](const Passing& passing) {
    return passing.from == from && passing.to == to && list_of(passing.value) == list_of(value);
  });
  const auto index = static_cast<int32_t>(known - plan.passings.begin());
  if (known == plan.passings.end()) plan.passings.push_back({.from = from, .to = to, .value = value});
  return index;
}

}  // namespace

void pair_tiles(Plan& plan, NodeList& list) {
  const auto count = static_cast<int32_t>(list.nodes.size());
  for (int32_t from = 0; from < count; ++from) {
    Node& giver = list.nodes[static_cast<size_t>(from)];
    // CPU kernels have no tiles; this avoids a query at each launch.
    if (plan.device(giver.device).kind != DeviceKind::cuda) continue;
    const std::optional<ValueId> given = rows_of(plan, giver);
    if (!given) continue;
    const ValueId value = *given;
    if (value == list.hidden || uses_of(list, value) != 2) continue;
    for (int32_t to = from + 1; to < count; ++to) {
      Node& reader = list.nodes[static_cast<size_t>(to)];
      const auto* product = operands_of<MatmulOperands>(reader);
      if (product == nullptr || product->x.value != value) continue;
      const auto& desc = std::get<ops::MatmulDesc>(reader.desc);
      const bool alike = reader.device == giver.device && reader.rows_factor == 1 && giver.rows_factor == 1 &&
                         !reader.per_run && !giver.per_run;
      if (alike && desc.batch == 1 && whole(plan, product->x, desc.k) && !selects_between(list, from, to)) {
        giver.gives = reader.gets = passing_of(plan, giver.key, reader.key, value);
      }
      break;
    }
  }
}

}  // namespace dyno::plan
