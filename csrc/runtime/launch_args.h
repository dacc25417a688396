// Fills the arguments of a launch from a node's operands, by name. An operand `y` fills the arguments y (address),
// y_stride and y_batch_stride (in elements; with the suffix _bytes in bytes). A weight `w` fills w (address) and
// w_stride_bytes, w_batch_stride_bytes or w_expert_stride_bytes (distance between its matrices). A number fills the
// argument of its name.
// Arguments that depend on the u-batch are listed in from_batch(). Operands that are not arguments are listed in
// only_plan() (ops/<family>/fields.h). Any other name without a counterpart is a compile error.
#pragma once

#include <algorithm>
#include <array>

#include "plan/plan.h"

namespace dyno::runtime {

using ops::FieldNames;

namespace detail {

constexpr bool is_one_of(std::string_view name, const FieldNames& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Suffixes of arguments that belong to an address.
constexpr bool is_row_stride(std::string_view ending) {
  return is_one_of(ending, {"_stride", "_batch_stride", "_stride_bytes", "_batch_stride_bytes"});
}
constexpr bool is_matrix_stride(std::string_view ending) {
  return is_one_of(ending, {"_stride_bytes", "_batch_stride_bytes", "_expert_stride_bytes"});
}
// Two stacks of matrices with the same distance share this argument.
inline constexpr std::string_view kSharedStride = "w_expert_stride_bytes";

template <typename O>
constexpr bool operand_fills(std::string_view argument) {
  bool fills = false;
  for_each_field<O>([&]<typename Member>(std::string_view name, Member O::*) {
    fills |= argument == name;
    if (!argument.starts_with(name)) {
      fills |= plan::IsWeight<Member> && name.starts_with("w_") && argument == kSharedStride;
      return;
    }
    const std::string_view ending = argument.substr(name.size());
    fills |= (plan::IsOperand<Member> && is_row_stride(ending)) || (plan::IsWeight<Member> && is_matrix_stride(ending));
  });
  return fills;
}

template <typename Args, typename O>
constexpr bool all_arguments_filled() {
  bool all = true;
  for_each_field<Args>([&](std::string_view name, auto) {
    all &= is_one_of(name, from_batch(std::type_identity<Args>{})) != operand_fills<O>(name);
  });
  return all;
}
template <typename Args, typename O>
constexpr bool all_operands_taken() {
  bool all = true;
  for_each_field<O>([&](std::string_view name, auto) {
    all &= is_one_of(name, only_plan(std::type_identity<O>{})) != (field_index<Args>(name) != kNoField);
  });
  return all;
}

// Sets the argument called name + ending, if there is one.
template <typename Args, size_t kIndex, typename Value>
void set_field(Args& args, const Value& value) {
  if constexpr (kIndex != kNoField) {
    constexpr auto member = field_at<kIndex>(fields<Args>()).member;
    auto& argument = args.*member;
    using Argument = std::remove_reference_t<decltype(argument)>;
    if constexpr (std::is_pointer_v<Argument> && std::is_const_v<std::remove_pointer_t<Value>>) {
      argument = static_cast<Argument>(static_cast<const void*>(value));
    } else if constexpr (std::is_pointer_v<Argument>) {
      argument = static_cast<Argument>(static_cast<void*>(value));
    } else {
      argument = value;
    }
  }
}

}  // namespace detail

template <typename Env>
const float* vector_of(const Env& env, model::WeightId id) {
  return id == model::kNone ? nullptr : reinterpret_cast<const float*>(env.weight(id));
}

// Fills the members of `args` that have an operand; the others do not change. Env is the one of launch_node().
template <typename Args, typename O, typename Env>
void fill_args(Args& args, const O& operands, const Env& env) {
  for_each_field_index<O>([&]<size_t I>() {
    constexpr auto field = field_at<I>(fields<O>());
    constexpr auto at = [field](std::string_view ending = "") { return field_index<Args>(field.name, ending); };
    const auto& value = operands.*field.member;
    using Member = std::remove_cvref_t<decltype(value)>;
    constexpr int64_t kFloat = sizeof(float);
    if constexpr (plan::IsOperand<Member>) {
      detail::set_field<Args, at()>(args, env.at(value));
      detail::set_field<Args, at("_stride")>(args, value.stride_bytes / kFloat);
      detail::set_field<Args, at("_stride_bytes")>(args, value.stride_bytes);
      detail::set_field<Args, at("_batch_stride")>(args, value.batch_stride_bytes / kFloat);
      detail::set_field<Args, at("_batch_stride_bytes")>(args, value.batch_stride_bytes);
    } else if constexpr (plan::IsWeight<Member>) {
      if (value.id == model::kNone) return;
      detail::set_field<Args, at()>(args, env.weight(value.id));
      const int64_t stride = static_cast<int64_t>(env.weight_bytes(value.id)) / env.model.weight(value.id).batch;
      detail::set_field<Args, at("_stride_bytes")>(args, stride);
      detail::set_field<Args, at("_batch_stride_bytes")>(args, stride);
      detail::set_field<Args, at("_expert_stride_bytes")>(args, stride);
      if constexpr (field.name.starts_with("w_")) {
        detail::set_field<Args, field_index<Args>(detail::kSharedStride)>(args, stride);
      }
    } else if constexpr (std::is_same_v<Member, plan::NormOfRows>) {
      detail::set_field<Args, at()>(args, ops::NormInside{.weight = vector_of(env, value.weight.id), .eps = value.eps});
    } else {
      detail::set_field<Args, at()>(args, value);
    }
  });
}

template <typename Args, typename O, typename Env>
Args args_of(const O& operands, const Env& env) {
  static_assert(detail::all_arguments_filled<Args, O>(),
                "every argument is filled by an operand of its name or named in from_batch()");
  static_assert(detail::all_operands_taken<Args, O>(),
                "every operand has an argument of its name or is named in only_plan()");
  Args args;
  fill_args(args, operands, env);
  return args;
}

}  // namespace dyno::runtime
