// Names of the enumerations in op.h, in the order of their values, for op keys, profiles and messages. The names of
// families come from families.def.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "ops/op.h"

namespace dyno::ops {

inline constexpr std::array<std::string_view, kFamilyCount> kFamilyNames = {
#define DYNO_OP_FAMILY(name, ...) #name,
#include "ops/families.def"
};
inline constexpr std::array<std::string_view, 3> kLayoutNames = {"plain", "x16", "gpu"};
inline constexpr std::array<std::string_view, 2> kActNames = {"f32", "q8"};
inline constexpr std::array<std::string_view, 4> kActivationNames = {"silu", "gelu_tanh", "swiglu_oai", "relu"};
inline constexpr std::array<std::string_view, 4> kPathNames = {"any", "matvec", "mmq", "dequantize"};
inline constexpr std::array<std::string_view, 3> kComputeNames = {"f16", "bf16", "f32"};
inline constexpr std::array<std::string_view, 3> kGatingNames = {"softmax", "sigmoid", "softmax_selected"};
inline constexpr std::array<std::string_view, 2> kLinearRuleNames = {"delta", "additive"};

// The names of an enumeration's values, selected by its type.
inline std::span<const std::string_view> enum_names(Layout) { return kLayoutNames; }
inline std::span<const std::string_view> enum_names(ActType) { return kActNames; }
inline std::span<const std::string_view> enum_names(Activation) { return kActivationNames; }
inline std::span<const std::string_view> enum_names(Gating) { return kGatingNames; }
inline std::span<const std::string_view> enum_names(LinearRule) { return kLinearRuleNames; }
inline std::span<const std::string_view> enum_names(ProductPath) { return kPathNames; }
inline std::span<const std::string_view> enum_names(ComputeType) { return kComputeNames; }

}  // namespace dyno::ops
