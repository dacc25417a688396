// The instances of variants.def and the weight types for which this build has code. DYNO_OPTIONAL is separate code that
// no default needs: GGML_CUDA_INSTANCES and GGML_CUDA_PROFILE leave such instances out, completely or for some weight
// types. A build for 90a alone leaves them out, too, and the variants that only older chips need. Every other
// DYNO_INSTANCE is in every build. GGML_CUDA_PROFILE also leaves out all kernels for types that its model does not
// have, and the groups of kernels that it does not need. csrc/cmake/cuda_instances.py writes the lists; kernels and
// supports() both read them, so code that is not compiled is never launched.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "ops/op.h"

namespace dyno::ops {

using Params = std::array<int16_t, kMaxParams>;

struct LeftOut {
  std::string_view variant;
  Params params;
  uint64_t kept;  // type_bit() of each weight type that still has it; kNoTypeBit for families without weight types
};

inline constexpr uint64_t kNoTypeBit = uint64_t{1} << 63;

// The bit of a type with GPU kernels, by its index in the list of types; 0 for others.
constexpr uint64_t type_bit(DType type) {
  constexpr DType kTypes[] = {
#define DYNO_FLOAT_TYPE(name, ...) DType::name,
#define DYNO_QUANT_TYPE(name, ...) DType::name,
#define DYNO_GPU_TYPE(name, ...) DType::name,
#include "core/weight_types.def"
  };
  static_assert(std::size(kTypes) < 63);
  for (size_t i = 0; i < std::size(kTypes); ++i) {
    if (kTypes[i] == type) return uint64_t{1} << i;
  }
  return 0;
}

inline constexpr LeftOut kLeftOut[] = {
#ifdef DYNO_HAVE_CUDA
#include "ops/left_out.inc"
#endif
    {"", {}, 0},  // an array needs at least one element
};

// Variants without any instance in this build. Their units are not compiled.
struct LeftOutVariant {
  std::string_view variant;
  uint64_t kept;  // as in LeftOut
};
inline constexpr LeftOutVariant kLeftOutVariants[] = {
#ifdef DYNO_HAVE_CUDA
#include "ops/left_out_variants.inc"
#endif
    {"", 0},
};

// Weight types with kernels, and the file name of the GGML_CUDA_PROFILE that left out others ("" if none). A build
// without CUDA answers as a build with all types.
#ifdef DYNO_HAVE_CUDA
inline constexpr uint64_t kTypesBuilt = 0
#define DYNO_BUILT_FLOAT(name) | type_bit(DType::name)
#define DYNO_BUILT_QUANT(name) | type_bit(DType::name)
#define DYNO_BUILT_GPU(name) | type_bit(DType::name)
#include "ops/built_types.inc"
    ;
inline constexpr std::string_view kBuiltFor =
#define DYNO_BUILT_FOR(profile) profile
#include "ops/built_types.inc"
    ;
#else
inline constexpr uint64_t kTypesBuilt = ~uint64_t{0};
inline constexpr std::string_view kBuiltFor = "";
#endif

// Whether this build has kernels for weights of this type. True for types without GPU kernels.
constexpr bool type_compiled(DType type) { return (type_bit(type) & ~kTypesBuilt) == 0; }
// The names of all types with kernels.
std::vector<std::string_view> types_compiled();

enum class KernelGroup : uint8_t {
#define DYNO_KERNEL_GROUP(name, words) name,
#include "ops/kernel_groups.def"
};
constexpr uint32_t group_bit(KernelGroup group) { return uint32_t{1} << static_cast<int>(group); }

// The groups with kernels, and the file name of the GGML_CUDA_PROFILE that left out others ("" if none). A build
// without CUDA answers as a build with all groups.
#ifdef DYNO_HAVE_CUDA
inline constexpr uint32_t kGroupsBuilt = 0
#define DYNO_BUILT_GROUP(name) | group_bit(KernelGroup::name)
#include "ops/built_groups.inc"
    ;
inline constexpr std::string_view kGroupsFor =
#define DYNO_GROUPS_FOR(profile) profile
#include "ops/built_groups.inc"
    ;
#else
inline constexpr uint32_t kGroupsBuilt = ~uint32_t{0};
inline constexpr std::string_view kGroupsFor = "";
#endif

constexpr bool group_built(KernelGroup group) { return (group_bit(group) & kGroupsBuilt) != 0; }
// The names of all groups with kernels.
std::vector<std::string_view> groups_compiled();

constexpr bool instance_compiled(std::string_view variant, uint64_t bit, const Params& params) {
  for (const LeftOut& instance : kLeftOut) {
    if (instance.variant == variant && instance.params == params) return (instance.kept & bit) != 0;
  }
  return true;
}
constexpr bool instance_compiled(std::string_view variant, DType type, const Params& params) {
  return instance_compiled(variant, type_bit(type), params);
}
// Whether any instance of the variant is in this build, for one of the variants that a build can lack.
constexpr bool variant_compiled(std::string_view variant, uint64_t bit) {
  for (const LeftOutVariant& left : kLeftOutVariants) {
    if (left.variant == variant) return (left.kept & bit) != 0;
  }
  return true;
}

// Called where a launch would use a missing instance. Throws UnsupportedError.
[[noreturn]] void throw_left_out(std::string_view variant, DType type, const Params& params);
// The same for a group of kernels.
[[noreturn]] void throw_left_out(KernelGroup group);

}  // namespace dyno::ops
