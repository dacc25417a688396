// The rows of x of a streaming block: normed where the product asks for it, turned into halves and laid out in shared
// memory as the B operands of its MMAs.
#pragma once

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

// Where the pair of k with number `pair` (k = 2·pair) of a tile stands, so that the 16 values that a lane needs (its t
// of every step) are 32 bytes in a row: t first, then step, then the two registers of B.
__device__ __forceinline__ int x_slot(int pair) {
  const int step = pair >> 3, high = (pair >> 2) & 1, t = pair & 3;
  return t * 8 + step * 2 + high;  // 4-byte words
}

__device__ __forceinline__ float4 load_quad(const float* x) {
  const float2 low = *reinterpret_cast<const float2*>(x), high = *reinterpret_cast<const float2*>(x + 2);
  return make_float4(low.x, low.y, high.x, high.y);
}

// The power of two s with max / s in [2^9, 2^10); 1 for zero and for what is not finite. Dividing by it is exact.
__device__ __forceinline__ float row_scale(float largest) {
  if (!(largest > 0.0f) || largest > 3.0e38f) return 1.0f;
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;  // subnormal: -127
  return __uint_as_float(static_cast<uint32_t>(min(max(exponent - 9, -126), 117) + 127) << 23);
}

struct StreamRows {
  const uint8_t* x;  // row r at x + r·stride
  int64_t stride;
  int rows, k;
  const float* norm;  // weights of the norm, or null
  bool normed;
  float eps;

  __device__ __forceinline__ const float* row(int r) const { return reinterpret_cast<const float*>(x + r * stride); }

  // What a warp knows of row r for its factor: the sum of squares for a norm, else the largest magnitude. The warps of
  // a block share the rows; stats holds [rows][warps of a row].
  __device__ __forceinline__ int warps_of_row() const {
    const int warps = blockDim.x >> 5;
    return rows >= warps ? 1 : warps / rows;
  }
  __device__ __forceinline__ void gather(float* stats) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const int share = warps_of_row(), groups = warps / share, within = warp % share;
    for (int r = warp / share; r < rows && warp < groups * share; r += groups) {
      const float* from = row(r);
      float stat = 0;
      for (int at = (within * 32 + lane) * 4; at < k; at += share * 128) {
        const float4 v = load_quad(from + at);
        if (normed) {
          stat += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
        } else {
          stat = fmaxf(fmaxf(fmaxf(stat, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
        }
      }
      stat = normed ? device::warp_sum(stat) : device::warp_max(stat);
      if (lane == 0) stats[r * share + within] = stat;
    }
  }
  // After a barrier: what row r is multiplied with before it becomes halves; `back` undoes it where that is not wanted.
  __device__ __forceinline__ float factor(const float* stats, int r, float& back) const {
    const int lane = threadIdx.x & 31, share = warps_of_row();
    const float mine = lane < share ? stats[r * share + lane] : 0.0f;
    if (normed) {
      back = 1.0f;
      return 1.0f / sqrtf(device::warp_sum(mine) / static_cast<float>(k) + eps);
    }
    back = row_scale(device::warp_max(mine));
    return 1.0f / back;
  }

  // Tiles [first, first + count) of row r as halves at `to` (128 bytes a tile), zeros from k on; with kRest also what
  // these leave over, at `rest`.
  template <bool kRest>
  __device__ __forceinline__ void halve(int r, float factor, int first, int count, uint8_t* to, uint8_t* rest) const {
    const float* from = row(r);
    for (int quad = threadIdx.x; quad < count * 16; quad += blockDim.x) {
      const int at = first * kGpuTile + quad * 4;
      float4 v = make_float4(0, 0, 0, 0);
      if (at < k) {
        v = load_quad(from + at);
        v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
        if (norm != nullptr) {
          const float4 w = *reinterpret_cast<const float4*>(norm + at);
          v = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
        }
      }
      const uint32_t low = device::pack_half2(v.x, v.y), high = device::pack_half2(v.z, v.w);
      const int tile = quad / 16 * 32, slot = x_slot(quad % 16 * 2), next = x_slot(quad % 16 * 2 + 1);
      reinterpret_cast<uint32_t*>(to)[tile + slot] = low;
      reinterpret_cast<uint32_t*>(to)[tile + next] = high;
      if constexpr (kRest) {
        const float2 a = __half22float2(device::as_half2(low)), b = __half22float2(device::as_half2(high));
        reinterpret_cast<uint32_t*>(rest)[tile + slot] = device::pack_half2(v.x - a.x, v.y - a.y);
        reinterpret_cast<uint32_t*>(rest)[tile + next] = device::pack_half2(v.z - b.x, v.w - b.y);
      }
    }
  }
};

}  // namespace dyno::ops::cuda
