// Scales of rows that become halves.
#pragma once

#include <cstdint>

namespace dyno::device {

// The power of two s with max / s in [2^9, 2^10); 1 for zero and for what is not finite. Dividing by it is exact.
__device__ __forceinline__ float row_scale(float largest) {
  if (!(largest > 0.0f) || largest > 3.0e38f) return 1.0f;
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;  // subnormal: -127
  return __uint_as_float(static_cast<uint32_t>(min(max(exponent - 9, -126), 117) + 127) << 23);
}

// Of what row_scale() gives, exactly: the exponent's sign is turned.
__device__ __forceinline__ float inverse_scale(float scale) {
  return __uint_as_float(0x7f000000u - __float_as_uint(scale));
}

}  // namespace dyno::device
