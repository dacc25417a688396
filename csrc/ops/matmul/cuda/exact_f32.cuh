// Dense products with float32 weights in float32: the routers of mixtures of experts, with few rows of w and a long k.
// The order of sums is fixed.
#pragma once

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/epilogue.cuh"

namespace dyno::ops::cuda {

inline bool fits_exact_f32(const Problem& p) {
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.w);
  // Larger products load less with the tiles of exact.cuh, whose blocks fill the chip from this size on.
  const bool small = static_cast<int64_t>(p.rows) * p.n < 1 << 19;
  return p.grouping == Grouping::dense && p.matrices == 1 && !p.gated() && small && p.n <= 1024 && p.k % 32 == 0 &&
         (address | static_cast<uintptr_t>(p.x_stride)) % 16 == 0;
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// Up to 4 rows of x: a block per row of w, whose threads share k. Loads of weights are issued before the rows of x are
// ready.
template <int kThreads>  // templates, because every weight type's unit includes them
__global__ void __launch_bounds__(kThreads) exact_f32_few_kernel(const Problem p) {
  constexpr int kAhead = 8, kWarps = kThreads / 32;
  __shared__ float parts[kWarps][4];
  device::let_next_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, steps = p.k / 4;
  const auto* w = reinterpret_cast<const float4*>(p.w) + static_cast<int64_t>(blockIdx.x) * steps;
  float4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int at = threadIdx.x + i * kThreads;
    ahead[i] = at < steps ? __ldg(w + at) : make_float4(0, 0, 0, 0);
  }
  device::wait_for_previous();
  float sums[4] = {};
  const auto add = [&](int at, float4 weights) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (r < p.rows) sums[r] = dot4(weights, reinterpret_cast<const float4*>(p.x + r * p.x_stride)[at], sums[r]);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (at < steps) add(at, ahead[i]);
  }
  for (int at = threadIdx.x + kAhead * kThreads; at < steps; at += kThreads) add(at, __ldg(w + at));
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const float sum = device::warp_sum(sums[r]);
    if (lane == 0) parts[warp][r] = sum;
  }
  __syncthreads();  // the parts of all warps are written
  if (threadIdx.x < p.rows) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) sum += parts[i][threadIdx.x];
    const int row = static_cast<int>(blockIdx.x);
    store_product(p, 0, row, threadIdx.x * p.y_stride + row, sum);
  }
}

// 16 rows of x by 16 rows of w per block. Its 8 warps share k and combine in shared memory. A lane has 2 by 4 of the
// sums.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) exact_f32_tile_kernel(const Problem p) {
  device::let_next_start();
  device::wait_for_previous();
  __shared__ float parts[8][16][17];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, i = lane / 4, j = lane % 4;
  const int first_row = blockIdx.x * 16, first_w = blockIdx.y * 16;
  const float4 *x[2], *w[4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    x[r] = reinterpret_cast<const float4*>(p.x + min(first_row + 2 * i + r, p.rows - 1) * p.x_stride);
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    w[c] = reinterpret_cast<const float4*>(p.w) + static_cast<int64_t>(min(first_w + 4 * j + c, p.n - 1)) * (p.k / 4);
  }
  const int steps = p.k / 4, begin = steps * warp / 8, end = steps * (warp + 1) / 8;
  float sums[2][4] = {};
#pragma unroll 4
  for (int at = begin; at < end; ++at) {
    float4 xs[2], ws[4];
#pragma unroll
    for (int r = 0; r < 2; ++r) xs[r] = x[r][at];
#pragma unroll
    for (int c = 0; c < 4; ++c) ws[c] = __ldg(w[c] + at);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[r][c] = dot4(xs[r], ws[c], sums[r][c]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < 4; ++c) parts[warp][2 * i + r][4 * j + c] = sums[r][c];
  }
  __syncthreads();  // all parts are written
  const int row = threadIdx.x / 16, column = threadIdx.x % 16;
  float sum = 0;
#pragma unroll
  for (int part = 0; part < 8; ++part) sum += parts[part][row][column];
  if (first_row + row < p.rows && first_w + column < p.n) {
    store_product(p, 0, first_w + column, (first_row + row) * p.y_stride + first_w + column, sum);
  }
}

inline void exact_f32(const Problem& p, CUstream_st* stream) {
  if (p.rows <= 4) {
    launch_dependent("matmul", exact_f32_few_kernel<128>, static_cast<unsigned>(p.n), 128, 0, stream, p);
    return;
  }
  const dim3 grid(static_cast<unsigned>((p.rows + 15) / 16), static_cast<unsigned>((p.n + 15) / 16));
  launch_dependent("matmul", exact_f32_tile_kernel<256>, grid, 256, 0, stream, p);
}

}  // namespace dyno::ops::cuda
