// CUDA's bfloat16 numbers on the CPU.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 v) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(v.bits) << 16);
}
// Rounds to nearest, ties to even. NaN stays NaN.
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
