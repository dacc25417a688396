// Which instances of variants.def, and which weight types, this build holds code for. DYNO_INSTANCE is in every build.
// DYNO_OPTIONAL is code of its own that no default needs: GGML_CUDA_INSTANCES and GGML_CUDA_PROFILE leave such
// instances out, all of them or for some weight types. GGML_CUDA_PROFILE leaves out all kernels of types that its model
// lacks, too. csrc/cmake/cuda_instances.py writes the lists; kernels and supports() both read them, so that what is not
// compiled is never launched.
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
  uint64_t kept;  // type_bit() of each weight type that has it all the same, kNoTypeBit for families without one
};

inline constexpr uint64_t kNoTypeBit = uint64_t{1} << 63;

// The bit of a type with GPU kernels, by its place in the list of types; 0 for others.
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
    {"", {}, 0},  // arrays have a first element
};

// Weight types with kernels, and the file name of the GGML_CUDA_PROFILE that left out others ("" if none did). A build
// without CUDA answers for one that has all.
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

// Whether kernels for weights of this type are here, if it is a type with kernels for GPUs at all.
constexpr bool type_compiled(DType type) { return (type_bit(type) & ~kTypesBuilt) == 0; }
// The names of all types with kernels.
std::vector<std::string_view> types_compiled();

constexpr bool instance_compiled(std::string_view variant, uint64_t bit, const Params& params) {
  for (const LeftOut& instance : kLeftOut) {
    if (instance.variant == variant && instance.params == params) return (instance.kept & bit) != 0;
  }
  return true;
}
constexpr bool instance_compiled(std::string_view variant, DType type, const Params& params) {
  return instance_compiled(variant, type_bit(type), params);
}

// For the place in a kernel's launch where the instance would be. Throws UnsupportedError.
[[noreturn]] void throw_left_out(std::string_view variant, DType type, const Params& params);

}  // namespace dyno::ops
