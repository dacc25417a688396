// The rows of x of a streaming product: a warp converts its part of k to f16 in shared memory, in the layout of the B
// operands of its MMAs. Warps do not wait for each other: a part has a separate scale, which multiplies the warp's
// sums. The factor of a norm multiplies the sum of all warps, when all squares of a row are known.
#pragma once

#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/row_scale.cuh"
#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

// The position of pair `pair` of k (k = 2·pair) in a tile. The 16 values that a lane reads (its t of every step) are 32
// contiguous bytes of a row: t first, then step, then the two registers of B.
__device__ __forceinline__ int x_slot(int pair) {
  const int step = pair >> 3, high = (pair >> 2) & 1, t = pair & 3;
  return t * 8 + step * 2 + high;  // 4-byte words
}

using device::inverse_scale;
using device::row_scale;

// One row, or the part of it that a warp has.
struct StreamRow {
  const float* x;
  const float* norm;  // weights of the norm, or null
  int k;

  __device__ __forceinline__ float4 quad(int at, float& squares) const {
    if (at >= k) return make_float4(0, 0, 0, 0);
    const float2 low = *reinterpret_cast<const float2*>(x + at), high = *reinterpret_cast<const float2*>(x + at + 2);
    float4 v = make_float4(low.x, low.y, high.x, high.y);
    squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    if (norm != nullptr) {
      const float4 w = *reinterpret_cast<const float4*>(norm + at);
      v = make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w);
    }
    return v;
  }
  static __device__ __forceinline__ float largest(float4 v, float so_far) {
    return fmaxf(fmaxf(fmaxf(so_far, fabsf(v.x)), fmaxf(fabsf(v.y), fabsf(v.z))), fabsf(v.w));
  }
  template <bool kRest>
  static __device__ __forceinline__ void put(float4 v, float factor, int quad, uint8_t* to, uint8_t* rest) {
    v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
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

  // Writes tiles [first, first + count) as f16 to `to` (128 bytes per tile), with zeros from k on; with kRest, also
  // writes the rests to `rest`. Returns the inverse of their scale; adds this warp's squares of these tiles to
  // `squares`.
  template <bool kRest>
  __device__ __forceinline__ float halve(int first, int count, uint8_t* to, uint8_t* rest, float& squares) const {
    constexpr int kKept = 2;  // quads that a lane keeps: 4 tiles
    const int lane = threadIdx.x & 31, quads = count * 16;
    float4 kept[kKept];
    float sum = 0, most = 0, again = 0;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      kept[i] = lane + 32 * i < quads ? quad(first * kGpuTile + (lane + 32 * i) * 4, sum) : make_float4(0, 0, 0, 0);
    }
#pragma unroll 4  // loads of several quads in flight
    for (int q = lane + 32 * kKept; q < quads; q += 32) most = largest(quad(first * kGpuTile + q * 4, sum), most);
#pragma unroll
    for (int i = 0; i < kKept; ++i) most = largest(kept[i], most);
    const float back = row_scale(device::warp_max_positive(most)), factor = inverse_scale(back);
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (lane + 32 * i < quads) put<kRest>(kept[i], factor, lane + 32 * i, to, rest);
    }
    for (int q = lane + 32 * kKept; q < quads; q += 32) {
      put<kRest>(quad(first * kGpuTile + q * 4, again), factor, q, to, rest);
    }
    squares = device::warp_sum(sum);
    return back;
  }
};

}  // namespace dyno::ops::cuda
