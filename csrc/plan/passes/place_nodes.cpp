// A device for each node: that of the weights it reads, that of the layer's cache for what works on it, and for others
// that of the first value they read.
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
         operands_of<RopeAttentionOperands>(node) != nullptr || operands_of<MlaExpandOperands>(node) != nullptr;
}

// Calls visit(id) for each weight that is there; those that an op cannot do without first.
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

class Placer {
 public:
  Placer(Plan& plan, const model::ModelDesc& model)
      : plan_(plan), model_(model), written_(plan.values.size(), kNowhere) {}

  void place(Node& node) {
    node.device = device_for(node);
    for_each_weight(node, [&](WeightId id) { check(node, id); });
    for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
      if (operand && operand.kUse != Access::read) written_[static_cast<size_t>(operand.value)] = node.device;
    });
  }

 private:
  static constexpr DeviceId kNowhere = -1;

  DeviceId device_for(const Node& node) const {
    if (works_on_cache(node)) return plan_.kv[static_cast<size_t>(node.layer)].device;
    // A bias, or what else rides along, does not decide: the matrix does. The weight of a norm is all it has.
    DeviceId device = kNowhere;
    const bool norm = operands_of<NormOperands>(node) != nullptr;
    for_each_weight(node, [&](WeightId id) {
      if (device == kNowhere && (norm || !is_vector(id))) device = plan_.weights[static_cast<size_t>(id)].device;
    });
    if (device != kNowhere) return device;
    for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
      if (device == kNowhere && operand && operand.kUse != Access::write) {
        device = written_[static_cast<size_t>(operand.value)];
      }
    });
    return device == kNowhere ? kMainDevice : device;
  }

  bool is_vector(WeightId id) const { return model_.weight(id).transform == model::Transform::to_f32; }

  // Vectors go with their op. A list is made of another's nodes, so each op comes to one device in all of them.
  void check(const Node& node, WeightId id) {
    WeightPlacement& weight = plan_.weights[static_cast<size_t>(id)];
    if (is_vector(id)) weight.device = node.device;
    DYNO_CHECK(PlanError, weight.device == node.device, "[placement] ", node.name, " runs on ",
               device_name(plan_.device(node.device)), ", but ", model_.weight(id).name, " lies on ",
               device_name(plan_.device(weight.device)), "; put the weights of this op on one device");
  }

  Plan& plan_;
  const model::ModelDesc& model_;
  std::vector<DeviceId> written_;  // where each value was last written
};

}  // namespace

void place_nodes(Plan& plan, const model::ModelDesc& model, NodeList& list) {
  Placer placer(plan, model);
  for (Node& node : list.nodes) placer.place(node);
}

}  // namespace dyno::plan
