// Writes HalfTiles.
#pragma once

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/row_scale.cuh"
#include "ops/half_tiles.h"

namespace dyno::ops::cuda {

// Writes four adjacent values of row r of a tile with `height` rows, k = `at` within the block at `block`; at % 4 is 0.
// Groups of eight lanes have 32 adjacent values of a row. `scale`: the scale of the row in this block, from
// device::row_scale().
__device__ __forceinline__ void put_half_tiles(float4 v, float scale, uint8_t* block, int height, int r, int at) {
  const float inverse = device::inverse_scale(scale);
  const uint32_t low = device::pack_half2(v.x * inverse, v.y * inverse);
  const uint32_t high = device::pack_half2(v.z * inverse, v.w * inverse);
  const int chunk = at % 64 / 8;
  *reinterpret_cast<uint2*>(block + (at / 64 * height + r) * 128 + ((chunk ^ (r & 7)) << 4) + at % 8 * 2) = {low, high};
  const float2 a = __half22float2(device::as_half2(low)), b = __half22float2(device::as_half2(high));
  float sum = (a.x + a.y) + (b.x + b.y);
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(device::kFullMask, sum, offset);
  if (at % 32 == 0) {
    auto* to = reinterpret_cast<__half*>(block + HalfTiles::kSumsAt * height + r / 8 * 256 + r % 8 * 16) + at / 32;
    const __half most = __float2half_rn(sum);
    to[0] = most;
    to[64] = __float2half_rn(sum - __half2float(most));
  }
  if (at == 0) reinterpret_cast<float*>(block + HalfTiles::kScalesAt * height)[r] = scale;
}

}  // namespace dyno::ops::cuda
