// The operands of a node: the struct of its family (ops/<family>/fields.h). Lifetimes of values, the printed plan and
// launch arguments are derived from their field lists. An operand fills the Args member of the same name
// (runtime/launch_args.h).
#pragma once

#include <variant>

#include "model/model_desc.h"
#include "ops/fields.h"
#include "ops/registry.h"

namespace dyno::plan {

static_assert(std::is_same_v<ops::WeightId, model::WeightId> && ops::kNoWeight == model::kNone);

using ops::Access;
using ops::access_name;
using ops::IsOperand;
using ops::IsWeight;
using ops::kNoValue;
using ops::NormOfRows;
using ops::Operand;
using ops::ValueId;
#define DYNO_OP_FAMILY(name, Stem, ...) using ops::Stem##Operands;
#include "ops/families.def"

namespace detail {
template <typename Desc>
struct OperandsOf;
#define DYNO_OP_FAMILY(name, Stem, ...) \
  template <>                           \
  struct OperandsOf<ops::Stem##Desc> {  \
    using Type = Stem##Operands;        \
  };
#include "ops/families.def"

template <typename>
struct AnyOperands;
template <typename... Descs>
struct AnyOperands<std::variant<Descs...>> {
  using Type = std::variant<typename OperandsOf<Descs>::Type...>;
};
}  // namespace detail

template <typename Desc>
using OperandsOf = typename detail::OperandsOf<Desc>::Type;
// In the order of OpDesc.
using Operands = typename detail::AnyOperands<ops::OpDesc>::Type;

// Calls visit(name, operand) for each operand of a node, including absent ones.
template <typename AnyOperands, typename Visit>
void for_each_operand(AnyOperands& operands, const Visit& visit) {
  std::visit(
      [&]<typename O>(O& o) {
        for_each_field<std::remove_const_t<O>>([&](std::string_view name, auto member) {
          if constexpr (IsOperand<std::remove_cvref_t<decltype(o.*member)>>) visit(name, o.*member);
        });
      },
      operands);
}

}  // namespace dyno::plan
