// Which instances of variants.def this build holds code for. DYNO_INSTANCE is in every build. DYNO_OPTIONAL is code of
// its own that no default needs: GGML_CUDA_INSTANCES and GGML_CUDA_PROFILE leave such instances out, all of them or for
// some weight types. csrc/cmake/cuda_instances.py writes the list; kernels and supports() both read it, so that what is
// not compiled is never launched.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "core/dtype.h"
#include "ops/op.h"

namespace dyno::ops {

using Params = std::array<int16_t, kMaxParams>;

struct LeftOut {
  std::string_view variant;
  Params params;
  uint64_t kept;  // type_bit() of each weight type that has it all the same, kNoTypeBit for families without one
};

constexpr uint64_t type_bit(DType type) { return uint64_t{1} << static_cast<uint32_t>(type); }
inline constexpr uint64_t kNoTypeBit = uint64_t{1} << 63;

inline constexpr LeftOut kLeftOut[] = {
#ifdef DYNO_HAVE_CUDA
#include "ops/left_out.inc"
#endif
    {"", {}, 0},  // arrays have a first element
};

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
