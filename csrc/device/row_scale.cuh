// Scales of rows that are converted to f16.
#pragma once

#include <cstdint>

namespace dyno::device {

// The power of two s with max / s in [2^9, 2^10); 1 if max is zero or not finite. Division by it is exact.
__device__ __forceinline__ float row_scale(float largest) {
  if (!(largest > 0.0f) || largest > 3.0e38f) return 1.0f;
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;  // subnormal: -127
  return __uint_as_float(static_cast<uint32_t>(min(max(exponent - 9, -126), 117) + 127) << 23);
}

// The exact inverse of a row_scale() result: the sign of the exponent is flipped.
__device__ __forceinline__ float inverse_scale(float scale) {
  return __uint_as_float(0x7f000000u - __float_as_uint(scale));
}

}  // namespace dyno::device
