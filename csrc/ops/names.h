// Names of the enumerations in op.h, in the order of their values: for op keys, profiles and messages.
#pragma once

#include <array>
#include <span>
#include <string_view>

#include "ops/op.h"

namespace dyno::ops {

inline constexpr std::array<std::string_view, kFamilyCount> kFamilyNames = {
    "embed",     "norm",         "rope",       "matmul",         "matmul_id",  "up_gate",       "moe_up_gate",
    "moe_route", "moe_sum",      "attention",  "kv_store",       "copy",       "sample",        "glu",
    "qkv",       "moe_down_sum", "mla_expand", "qkv_rope_store", "norm_route", "rope_attention"};
inline constexpr std::array<std::string_view, 3> kLayoutNames = {"plain", "x16", "gpu"};
inline constexpr std::array<std::string_view, 2> kActNames = {"f32", "q8"};
inline constexpr std::array<std::string_view, 3> kActivationNames = {"silu", "gelu_tanh", "swiglu_oai"};
inline constexpr std::array<std::string_view, 4> kPathNames = {"any", "matvec", "mmq", "dequantize"};
inline constexpr std::array<std::string_view, 3> kComputeNames = {"f16", "bf16", "f32"};
inline constexpr std::array<std::string_view, 3> kGatingNames = {"softmax", "sigmoid", "softmax_selected"};

// The names of an enumeration's values, by its type.
inline std::span<const std::string_view> enum_names(Layout) { return kLayoutNames; }
inline std::span<const std::string_view> enum_names(ActType) { return kActNames; }
inline std::span<const std::string_view> enum_names(Activation) { return kActivationNames; }
inline std::span<const std::string_view> enum_names(Gating) { return kGatingNames; }
inline std::span<const std::string_view> enum_names(ProductPath) { return kPathNames; }
inline std::span<const std::string_view> enum_names(ComputeType) { return kComputeNames; }

}  // namespace dyno::ops
