// The device of each node: the device of its weights; for ops on the cache, the device of the layer's cache; for ops on
// a state, the device of that state; for others, the device of the first value that they read.
#include <span>
#include <type_traits>

#include "core/error.h"
#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

using model::kNone;
using model::WeightId;

bool works_on_cache(const Node& node) {
  if (const auto* attention = operands_of<AttentionOperands>(node)) return !attention->keys;
  return operands_of<KvStoreOperands>(node) != nullptr || operands_of<QkvRopeStoreOperands>(node) != nullptr ||
         operands_of<RopeAttentionOperands>(node) != nullptr || operands_of<MlaExpandOperands>(node) != nullptr ||
         operands_of<IndexSelectOperands>(node) != nullptr;
}

// Calls visit(id) for each weight that is present, with required weights first.
template <typename Visit>
void for_each_weight(const Node& node, const Visit& visit) {
  const auto walk = [&](bool required) {
    std::visit(
        [&]<typename O>(const O& o) {
          for_each_field<O>([&](std::string_view, auto member) {
            const auto& field = o.*member;
            using Field = std::remove_cvref_t<decltype(field)>;
            if constexpr (IsWeight<Field>) {
              if (Field::kRequired == required && field.id != kNone) visit(field.id);
            } else if constexpr (std::is_same_v<Field, NormOfRows>) {
              if (!required && field.weight.id != kNone) visit(field.weight.id);
            }
          });
        },
        node.operands);
  };
  walk(/*required=*/true);
  walk(/*required=*/false);
}

// The state that a node updates, or -1.
int32_t state_of(const Node& node) {
  return std::visit(
      []<typename O>(const O& o) {
        if constexpr (requires { o.state_index; }) {
          return static_cast<int32_t>(o.state_index);
        } else {
          return int32_t{-1};
        }
      },
      node.operands);
}

class Placer {
 public:
  Placer(Plan& plan, const model::ModelDesc& model, ListId list)
      : plan_(plan), model_(model), list_(list), written_(plan.values.size(), kNowhere) {}

  // `rest`: the nodes after it.
  void place(Node& node, std::span<const Node> rest) {
    node.device = device_for(node, rest);
    for_each_weight(node, [&](WeightId id) { check(node, id); });
    for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
      if (operand && operand.kUse != Access::read) written_[static_cast<size_t>(operand.value)] = node.device;
      if (operand && operand.value == plan_.logits && operand.kUse != Access::read) {
        plan_.values[static_cast<size_t>(operand.value)].device = node.device;
      }
    });
  }

 private:
  static constexpr DeviceId kNowhere = -1;

  DeviceId device_for(const Node& node, std::span<const Node> rest) const {
    if (works_on_cache(node)) {
      const auto* attention = operands_of<AttentionOperands>(node);
      const bool of_another = attention != nullptr && attention->cache_layer >= 0;
      return plan_.kv[static_cast<size_t>(of_another ? attention->cache_layer : node.layer)].device;
    }
    // The general list, which comes first, decides where a state is.
    if (const int32_t state = state_of(node); state >= 0 && is_streamed(list_)) {
      return plan_.states[static_cast<size_t>(state)].device;
    }
    // A sum from another device moves to the residual stream.
    const auto* sum = operands_of<MoeSumOperands>(node);
    if (sum != nullptr && !sum->weights) return written_[static_cast<size_t>(sum->residual.value)];
    // The matrix decides, not a bias or another vector. A norm has only its own weight.
    DeviceId device = kNowhere;
    const bool norm = operands_of<NormOperands>(node) != nullptr;
    for_each_weight(node, [&](WeightId id) {
      if (device == kNowhere && (norm || !is_vector(id))) device = plan_.device_in(Plan::weights_list(node, list_), id);
    });
    if (device != kNowhere) return device;
    for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
      if (device == kNowhere && operand && operand.kUse != Access::write) {
        device = written_[static_cast<size_t>(operand.value)];
      }
    });
    if (device == kNowhere) return kMainDevice;
    // Only the CPU uses int8 rows. Rows of a GPU move as float32.
    if (quantises(node) && plan_.device(device).kind == DeviceKind::cuda) return reader_of(node, rest);
    return device;
  }

  static bool quantises(const Node& node) {
    const auto* copy = std::get_if<ops::CopyDesc>(&node.desc);
    return copy != nullptr && copy->act == ops::ActType::q8;
  }

  // The device of the first product that reads the rows which the node writes.
  DeviceId reader_of(const Node& node, std::span<const Node> rest) const {
    const ValueId rows = std::get<CopyOperands>(node.operands).out.value;
    for (const Node& next : rest) {
      DeviceId device = kNowhere;
      bool reads = false;
      for_each_operand(next.operands, [&](std::string_view, const auto& operand) {
        reads |= operand.value == rows && operand.kUse != Access::write;
      });
      if (!reads) continue;
      for_each_weight(next, [&](WeightId id) {
        if (device == kNowhere && !is_vector(id)) device = plan_.device_in(Plan::weights_list(next, list_), id);
      });
      if (device != kNowhere) return device;
    }
    throw PlanError(str_cat("[plan] ", node.name, ": nothing reads its int8 rows"));
  }

  bool is_vector(WeightId id) const { return model_.weight(id).transform == model::Transform::to_f32; }

  // Vectors follow their op. Lists share their nodes, so each op must be on the same device in all of them.
  void check(const Node& node, WeightId id) {
    WeightPlacement& weight = plan_.weights[static_cast<size_t>(id)];
    if (is_vector(id) && is_streamed(list_) && weight.device != node.device && node.device == kMainDevice) {
      weight.stream = {.wanted = true, .layout = weight.layout, .bytes = weight.bytes};  // copied with its matrix
    } else if (is_vector(id) && !is_streamed(list_)) {
      weight.device = node.device;
    }
    DYNO_CHECK(PlanError, plan_.device_in(Plan::weights_list(node, list_), id) == node.device, "[placement] ",
               node.name, " runs on ", device_name(plan_.device(node.device)), ", but ", model_.weight(id).name,
               " is on ", device_name(plan_.device(weight.device)), "; put the weights of this op on one device");
  }

  Plan& plan_;
  const model::ModelDesc& model_;
  ListId list_;
  std::vector<DeviceId> written_;  // the device that last wrote each value
};

}  // namespace

void place_nodes(Plan& plan, const model::ModelDesc& model, NodeList& list) {
  Placer placer(plan, model, list.id);
  const std::span<Node> nodes(list.nodes);
  for (size_t i = 0; i < nodes.size(); ++i) {
    placer.place(nodes[i], nodes.subspan(i + 1));
    const int32_t state = state_of(nodes[i]);
    if (state >= 0) plan.states[static_cast<size_t>(state)].device = nodes[i].device;
  }
}

void check_places(const Plan& plan, const model::ModelDesc& model) {
  for (const NodeList* list :
       {&plan.general, &plan.fused, &plan.single, &plan.expanded, &plan.streamed, &plan.streamed_expanded}) {
    for (const Node& node : list->nodes) {
      for_each_weight(node, [&](WeightId id) {
        DYNO_CHECK(PlanError, plan.device_in(Plan::weights_list(node, list->id), id) == node.device, "[placement] ",
                   node.name, " runs on ", device_name(plan.device(node.device)), " in the ", list_name(list->id),
                   " list, but ", model.weight(id).name, " is on ", device_name(plan.device_of(id)),
                   "; put the weights of this op on one device");
      });
    }
  }
}

}  // namespace dyno::plan
