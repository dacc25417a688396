// Properties that follow from the nodes of a list, whichever pass wrote them.
#include <algorithm>
#include <map>

#include "core/error.h"
#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

using model::kNone;

// The compiler checks that every operand is named. This checks that required ones are set.
void check_given(const Node& node) {
  std::visit(
      [&]<typename O>(const O& o) {
        for_each_field<O>([&](std::string_view field, auto member) {
          using Member = std::remove_cvref_t<decltype(o.*member)>;
          bool given = true;
          if constexpr (IsOperand<Member>) given = !Member::kRequired || (o.*member);
          if constexpr (IsWeight<Member>) given = !Member::kRequired || (o.*member).id != kNone;
          DYNO_CHECK(PlanError, given, "[plan] ", node.name, " has no ", field);
        });
      },
      node.operands);
}

void number_keys(Plan& plan, NodeList& list) {
  for (Node& node : list.nodes) {
    const std::string key = ops::op_key(node.desc);
    const auto known = std::find_if(plan.keys.begin(), plan.keys.end(), [&](const OpUse& use) {
      return use.key == key && use.rows_factor == node.rows_factor && use.device == node.device;
    });
    node.key = static_cast<int32_t>(known - plan.keys.begin());
    if (known == plan.keys.end()) {
      plan.keys.push_back({.desc = node.desc, .key = key, .device = node.device, .rows_factor = node.rows_factor});
    }
    ++plan.keys[static_cast<size_t>(node.key)].count[static_cast<size_t>(list.id)];
  }
}

void find_lives(Plan& plan, const NodeList& list) {
  for (size_t i = 0; i < list.nodes.size(); ++i) {
    const auto node = static_cast<int>(i);
    for_each_operand(list.nodes[i].operands, [&](std::string_view, const Operand& operand) {
      if (!operand) return;
      Value& v = plan.values[static_cast<size_t>(operand.value)];
      if (v.first_use < 0) v.first_use = node;
      v.last_use = node;
    });
  }
}

// Values with one row per token that are written up to a node and read after it.
std::vector<ValueId> living_after(const Plan& plan, const NodeList& list, int32_t node) {
  std::vector<ValueId> out;
  std::vector<bool> seen(plan.values.size(), false);
  for (size_t i = static_cast<size_t>(node) + 1; i < list.nodes.size(); ++i) {
    for_each_operand(list.nodes[i].operands, [&](std::string_view, const Operand& operand) {
      if (!operand || operand.value == plan.logits || seen[static_cast<size_t>(operand.value)]) return;
      seen[static_cast<size_t>(operand.value)] = true;
      const Value& value = plan.values[static_cast<size_t>(operand.value)];
      if (value.bytes_per_token > 0 && value.first_use <= node) out.push_back(operand.value);
    });
  }
  return out;
}

// Finds the last node that mixes tokens, which is the last one that needs all rows.
void find_selection(const Plan& plan, NodeList& list) {
  for (size_t i = 0; i < list.nodes.size(); ++i) {
    const Node& node = list.nodes[i];
    const auto at = static_cast<int32_t>(i);
    if (node.layer >= 0) list.head_node = at + 1;
    if (mixes_tokens(node)) list.select_node = at;
    if (changes_memory(node)) list.settled_node = at + 1;
  }
  if (list.select_node >= 0) list.select_values = living_after(plan, list, list.select_node);
  if (list.head_node > 0) list.head_values = living_after(plan, list, list.head_node - 1);
}

}  // namespace

void own_values(Plan& plan, NodeList& list) {
  std::map<ValueId, ValueId> own;
  const auto note = [&](const Operand& operand) {
    if (operand) own[operand.value] = operand.value;
  };
  for (const Node& node : list.nodes) {
    for_each_operand(node.operands, [&](std::string_view, const Operand& operand) { note(operand); });
  }
  for (auto& [from, to] : own) {
    const Value value = plan.values[static_cast<size_t>(from)];
    if (value.list == list.id || from == plan.logits) continue;
    to = add_value(plan, value.name, value.bytes_per_token, value.bytes_fixed, list.id);
  }
  for (Node& node : list.nodes) {
    for_each_operand(node.operands, [&](std::string_view, Operand& operand) {
      if (operand) operand.value = own.at(operand.value);
    });
  }
  if (list.residual != kNoValue) list.residual = own.at(list.residual);
  if (list.rows_in != kNoValue) list.rows_in = own.at(list.rows_in);
  if (list.hidden != kNoValue) list.hidden = own.at(list.hidden);
}

bool has_state(const Node& node) {
  return std::visit([]<typename O>(const O&) { return requires(O o) { o.state_index; }; }, node.operands);
}

bool mixes_tokens(const Node& node) {
  return has_state(node) || operands_of<AttentionOperands>(node) != nullptr ||
         operands_of<RopeAttentionOperands>(node) != nullptr;
}

bool changes_memory(const Node& node) {
  return has_state(node) || operands_of<KvStoreOperands>(node) != nullptr ||
         operands_of<QkvRopeStoreOperands>(node) != nullptr || operands_of<RopeAttentionOperands>(node) != nullptr;
}

void finish_list(Plan& plan, NodeList& list) {
  for (const Node& node : list.nodes) check_given(node);
  number_keys(plan, list);
  if (list.id == ListId::draw) return;  // its inputs and outputs are outside the arena
  find_lives(plan, list);
  find_selection(plan, list);
  pair_tiles(plan, list);
  if (list.hidden == kNoValue) return;
  list.hidden_node = plan.values[static_cast<size_t>(list.hidden)].first_use;
  const bool normed = std::holds_alternative<NormOperands>(list.nodes[static_cast<size_t>(list.hidden_node)].operands);
  DYNO_CHECK(PlanError, normed, "[plan] ", list.nodes[static_cast<size_t>(list.hidden_node)].name,
             " makes the rows that the output reads; expected a norm");
}

ValueId add_value(Plan& plan, const std::string& name, size_t bytes_per_token, size_t bytes_fixed, ListId list,
                  DeviceId device) {
  plan.values.push_back(
      {.name = name, .bytes_per_token = bytes_per_token, .bytes_fixed = bytes_fixed, .list = list, .device = device});
  return static_cast<ValueId>(plan.values.size() - 1);
}

Span layer_span(const Nodes& nodes, int32_t layer) {
  const auto of_layer = [&](const Node& node) { return node.layer == layer; };
  const auto begin = std::find_if(nodes.begin(), nodes.end(), of_layer);
  const auto end = std::find_if_not(begin, nodes.end(), of_layer);
  return {static_cast<size_t>(begin - nodes.begin()), static_cast<size_t>(end - nodes.begin())};
}

void replace_nodes(Nodes& nodes, Span span, Node node) {
  nodes[span.begin] = std::move(node);
  const auto at = [&](size_t place) { return nodes.begin() + static_cast<std::ptrdiff_t>(place); };
  nodes.erase(at(span.begin + 1), at(span.end));
}

}  // namespace dyno::plan
