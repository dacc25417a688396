// The parts of a node's operands: values, weights and how an op uses them. Each family's fields.h has a struct with
// named members of these types.
//
// In such a struct, `rope_table` is an index into Plan::rope_tables, `state_index` into Plan::states; `moe_index`
// counts the layers with experts, for routing capture and pinning.
#pragma once

#include <array>
#include <cstdint>

#include "core/fields.h"

namespace dyno::ops {

using WeightId = int32_t;  // same type as model::WeightId
inline constexpr WeightId kNoWeight = -1;

using ValueId = int32_t;
inline constexpr ValueId kNoValue = -1;

// A slice of a value's rows.
struct Operand {
  ValueId value = kNoValue;
  int64_t offset_bytes = 0;
  int64_t stride_bytes = 0;        // between tokens (or rows, for ops with rows_per_token > 1)
  int64_t batch_stride_bytes = 0;  // between heads, for batched products
  explicit operator bool() const { return value != kNoValue; }
};

enum class Access : uint8_t { read, write, update };  // update: reads and writes
constexpr std::string_view access_name(Access access) {
  return access == Access::read ? "read" : access == Access::write ? "write" : "update";
}

// An operand and its use. A required operand has no default, so a node without it does not compile.
template <Access kAccess>
struct Needs : Operand {
  static constexpr Access kUse = kAccess;
  static constexpr bool kRequired = true;
  Needs(const Operand& operand) : Operand(operand) {}
};
template <Access kAccess>
struct May : Operand {
  static constexpr Access kUse = kAccess;
  static constexpr bool kRequired = false;
  May() = default;
  May(const Operand& operand) : Operand(operand) {}
};
using Reads = Needs<Access::read>;
using Writes = Needs<Access::write>;
using Updates = Needs<Access::update>;
using MayRead = May<Access::read>;
using MayWrite = May<Access::write>;

// The same for weights.
struct NeedsWeight {
  static constexpr bool kRequired = true;
  WeightId id;
  NeedsWeight(WeightId weight) : id(weight) {}
};
struct MayUseWeight {
  static constexpr bool kRequired = false;
  WeightId id = kNoWeight;
  MayUseWeight() = default;
  MayUseWeight(WeightId weight) : id(weight) {}
};

// The norm of a product that normalises its input rows (desc.norm).
struct NormOfRows {
  MayUseWeight weight{};
  float eps = 0.0f;
};
DYNO_FIELDS(NormOfRows, weight, eps)

template <typename T>
concept IsOperand = std::is_base_of_v<Operand, T>;
template <typename T>
concept IsWeight = std::is_same_v<T, NeedsWeight> || std::is_same_v<T, MayUseWeight>;

// ---- mapping of operands to arguments ------------------------------------------------------------------------------

using FieldNames = std::array<std::string_view, 16>;  // unused entries are empty

// Arguments that depend on the u-batch; runtime/launch_node.h fills them.
template <typename Args>
constexpr FieldNames from_batch(std::type_identity<Args>) {
  return {};
}
// Operands that are not arguments.
template <typename Operands>
constexpr FieldNames only_plan(std::type_identity<Operands>) {
  return {};
}

}  // namespace dyno::ops
