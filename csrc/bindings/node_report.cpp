// Reports the op lists of a plan, launch by launch, from the fields of each family's operands.
#include <nanobind/stl/string.h>

#include "bindings/session_report.h"

namespace nb = nanobind;

namespace dyno {
namespace {

nb::dict operand_dict(const plan::Plan& p, const plan::Operand& operand, plan::Access access) {
  const plan::Value& value = p.values[static_cast<size_t>(operand.value)];
  nb::dict d;
  d["access"] = std::string(plan::access_name(access));
  d["value"] = operand.value;
  d["name"] = value.name;
  d["device"] = device_name(p.device(value.device));
  d["offset_bytes"] = operand.offset_bytes;
  d["stride_bytes"] = operand.stride_bytes;
  d["first_use"] = value.first_use;
  d["last_use"] = value.last_use;
  const bool placed = plan::in_arena(p, operand.value);
  d["arena_offset"] = placed ? nb::cast(value.offset) : nb::none();
  d["bytes"] = placed ? nb::cast(plan::value_bytes(p, value)) : nb::none();
  return d;
}

template <typename O>
nb::dict fields_dict(const plan::Plan& p, const model::ModelDesc& model, const O& operands) {
  nb::dict d;
  for_each_field<O>([&](std::string_view name, auto member) {
    const auto& field = operands.*member;
    using Field = std::remove_cvref_t<decltype(field)>;
    const nb::str key(name.data(), name.size());
    if constexpr (plan::IsOperand<Field>) {
      d[key] = field ? nb::object(operand_dict(p, field, Field::kUse)) : nb::none();
    } else if constexpr (plan::IsWeight<Field>) {
      d[key] = field.id == model::kNone ? nb::none() : nb::object(nb::cast(model.weight(field.id).name));
    } else if constexpr (std::is_same_v<Field, plan::NormOfRows>) {
      d[key] = fields_dict(p, model, field);
    } else {
      d[key] = field;
    }
  });
  return d;
}

}  // namespace

nb::list node_list(const runtime::Session& session) {
  const plan::Plan& p = session.plan();
  nb::list out;
  for (const plan::NodeList* list :
       {&p.general, &p.fused, &p.single, &p.batched, &p.expanded, &p.draw, &p.streamed, &p.streamed_expanded}) {
    for (const plan::Node& node : list->nodes) {
      nb::dict d;
      d["list"] = std::string(plan::list_name(list->id));
      d["name"] = node.name;
      d["key"] = p.keys[static_cast<size_t>(node.key)].key;
      d["device"] = device_name(p.device(node.device));
      d["layer"] = node.layer < 0 ? nb::none() : nb::cast(node.layer);
      d["tiles"] = node.gives >= 0 ? nb::cast("gives") : node.gets >= 0 ? nb::cast("gets") : nb::none();
      d["operands"] = std::visit([&](const auto& o) { return fields_dict(p, session.model(), o); }, node.operands);
      out.append(d);
    }
  }
  return out;
}

}  // namespace dyno
