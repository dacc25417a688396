// Queries of flash attention as f16 pairs (half_pairs.cuh) in shared memory.
#pragma once

#include "device/half_pairs.cuh"
#include "ops/attention/flash_task.cuh"

namespace dyno::ops {

// The exponent of the power of two that scales `largest` into [2^14, 2^15); 0 if it is zero or not finite.
__device__ __forceinline__ int query_exponent(float largest) {
  if (!(largest > 0.0f) || largest > 3.0e38f) return 0;
  return min(14 - (static_cast<int>(__float_as_uint(largest) >> 23) - 127), 126);  // subnormal: -127
}
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// A warp's 16 rows of queries as pairs, with rests times `rest_scale`. `place(row, column)` is the index of an even
// column in `halves` and `rests`. `factors` get the inverses of the rows' powers of two.
template <int kHead, typename Place>
__device__ __forceinline__ void load_query_pairs(const CudaAttention& t, const CudaTile& tile, int kv_head,
                                                 int first_row, float rest_scale, uint16_t* halves, uint16_t* rests,
                                                 float* factors, const Place& place) {
  constexpr int kBatch = 4, kPieces = kHead / 64;
  const int lane = threadIdx.x % 32;
  const float scale = t.query_scale();
  for (int first = first_row; first < first_row + 16; first += kBatch) {
    float v[kBatch][kPieces][2];  // all loads of a batch are issued before the first use
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const bool valid = first + b < tile.rows();
      const float* from = query_row(t, tile, tile.row_begin + (valid ? first + b : 0), kv_head);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = p * 64 + lane * 2 + e;
          v[b][p][e] = valid && column < t.dk ? from[column] * scale : 0.0f;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      float largest = 0;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) largest = fmaxf(largest, fmaxf(fabsf(v[b][p][0]), fabsf(v[b][p][1])));
      const int exponent = query_exponent(device::warp_max(largest));
      const float s = power_of_two(exponent);
      if (lane == 0) factors[first + b] = power_of_two(-exponent);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        uint32_t rest;
        const int at = place(first + b, p * 64 + lane * 2);
        *reinterpret_cast<uint32_t*>(halves + at) =
            device::split_pair(v[b][p][0] * s, v[b][p][1] * s, rest_scale, rest);
        *reinterpret_cast<uint32_t*>(rests + at) = rest;
      }
    }
  }
}

}  // namespace dyno::ops
