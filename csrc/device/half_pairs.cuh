// Numbers as f16 pairs: the nearest f16 value, and the rest. Three products of such pairs (high·high, high·low,
// low·high) have 22 bits, nearly the precision of float32 (Ootomo and Yokota 2022, doi:10.1177/10943420221090256).
#pragma once

#include "device/ptx.cuh"

namespace dyno::device {

// A rest that is multiplied by this keeps its bits unless the high part is subnormal. In products, the other operand is
// divided by it.
inline constexpr float kRestScale = 2048.0f;
inline constexpr uint32_t kTwoRestUnits = 0x10001000u;  // 1 / kRestScale, twice

// Two numbers as f16; `rest` gets the remainders times `scale`. Values beyond the f16 range become the nearest
// representable pair.
__device__ __forceinline__ uint32_t split_pair(float a, float b, float scale, uint32_t& rest) {
  const uint32_t high = pack_half2(a, b);
  const float2 back = __half22float2(as_half2(high));
  rest = pack_half2((a - back.x) * scale, (b - back.y) * scale);
  return high;
}

// The same for eight numbers: 16 bytes of high parts and 16 bytes of rests.
__device__ __forceinline__ void split_eight(const float (&v)[8], float scale, uint4& high, uint4& rest) {
  high.x = split_pair(v[0], v[1], scale, rest.x);
  high.y = split_pair(v[2], v[3], scale, rest.y);
  high.z = split_pair(v[4], v[5], scale, rest.z);
  high.w = split_pair(v[6], v[7], scale, rest.w);
}

__device__ __forceinline__ uint32_t divide_by_rest_scale(uint32_t halves) {
  return as_bits(__hmul2(as_half2(halves), as_half2(kTwoRestUnits)));
}

// Eight floats from a 16-byte aligned address, or zeros.
__device__ __forceinline__ void load_eight(float (&v)[8], const float* from, bool valid) {
  const float4 zeros = make_float4(0, 0, 0, 0);
  const auto* quads = reinterpret_cast<const float4*>(from);
  const float4 low = valid ? quads[0] : zeros, high = valid ? quads[1] : zeros;
  v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
  v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

}  // namespace dyno::device
