// Plain weights and float32 throughout: the reference path, and float32 weights such as routers. Elements are
// dequantised exactly as the file format defines and summed by fused multiply-adds in a fixed order.
#pragma once

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/exact_f32.cuh"
#include "ops/matmul/gpu_pack.h"

namespace dyno::ops::cuda {

template <DType kType>
__device__ __forceinline__ float weight_value(const uint8_t* matrix, int64_t row, int k, int at) {
  using Block = typename FileBlock<kType>::Type;
  constexpr int kElements = kFileBlock<kType>;
  const Block* blocks = reinterpret_cast<const Block*>(matrix) + row * (k / kElements);
  return value_of<kType>(blocks[at / kElements], at % kElements);
}

// A warp per row of w; up to 8 rows of x per block, one with experts.
template <DType kType>
__global__ void __launch_bounds__(256) exact_rows_kernel(const Problem p) {
  device::let_next_start();
  device::wait_for_previous();
  const int lane = threadIdx.x & 31, row_of_w = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (row_of_w >= p.n) return;
  const bool experts = p.grouping == Grouping::experts;
  const int first = experts ? blockIdx.y : blockIdx.y * 8;
  const int rows = experts ? 1 : min(8, p.rows - first);
  const int matrix = experts ? p.ids[first] : p.first_matrix + static_cast<int>(blockIdx.z);
  if (matrix < 0 && lane == 0) p.y[first * p.y_stride + row_of_w] = 0;
  if (matrix < p.first_matrix || matrix >= p.last_matrix) return;
  const uint8_t* x =
      experts ? p.x + first / p.x_divisor * p.x_stride : p.x + matrix * p.x_batch_stride + first * p.x_stride;
  const uint8_t* w = p.w + matrix * p.w_stride;
  const uint8_t* w_up = p.gated() ? p.w_up + matrix * p.w_stride : nullptr;
  float sums[8] = {}, sums_up[8] = {};
  for (int at = lane; at < p.k; at += 32) {
    const float value = weight_value<kType>(w, row_of_w, p.k, at);
    const float value_up = w_up == nullptr ? 0.0f : weight_value<kType>(w_up, row_of_w, p.k, at);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      if (r >= rows) break;
      const float x_value = reinterpret_cast<const float*>(x + r * p.x_stride)[at];
      sums[r] = fmaf(value, x_value, sums[r]);
      sums_up[r] = fmaf(value_up, x_value, sums_up[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    if (r >= rows) break;
    const float sum = device::warp_sum(sums[r]);
    const float up = device::warp_sum(sums_up[r]);
    if (lane != 0) continue;
    const int64_t at = (experts ? 0 : matrix * p.y_batch_stride) + (first + r) * p.y_stride + row_of_w;
    if (p.gated()) {
      store_gated(p, experts ? matrix : 0, row_of_w, at, sum, up);
    } else {
      store_product(p, experts ? matrix : 0, row_of_w, at, sum);
    }
  }
}

// Many dense rows: 64 rows of x by 64 rows of w through shared memory.
template <DType kType, bool kGated>
__global__ void __launch_bounds__(256) exact_tiles_kernel(const Problem p) {
  constexpr int kTile = 64, kDepth = 16, kPitch = kTile + 4;
  __shared__ float xs[kDepth][kPitch], ws[1 + kGated][kDepth][kPitch];
  const int first_row = blockIdx.x * kTile, first_w = blockIdx.y * kTile, matrix = blockIdx.z;
  const uint8_t* x = p.x + matrix * p.x_batch_stride;
  const uint8_t* w[2] = {p.w + matrix * p.w_stride, kGated ? p.w_up + matrix * p.w_stride : nullptr};
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;  // 4 rows of w, 4 rows of x
  float sums[1 + kGated][4][4] = {};
  for (int k0 = 0; k0 < p.k; k0 += kDepth) {
#pragma unroll
    for (int i = 0; i < kTile * kDepth / 256; ++i) {
      const int index = threadIdx.x + i * 256, at = k0 + index % kDepth, row = index / kDepth;
      const bool x_valid = first_row + row < p.rows && at < p.k, w_valid = first_w + row < p.n && at < p.k;
      xs[index % kDepth][row] = x_valid ? reinterpret_cast<const float*>(x + (first_row + row) * p.x_stride)[at] : 0.0f;
#pragma unroll
      for (int mat = 0; mat <= kGated; ++mat) {
        ws[mat][index % kDepth][row] = w_valid ? weight_value<kType>(w[mat], first_w + row, p.k, at) : 0.0f;
      }
    }
    __syncthreads();  // the tiles are complete
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const float4 xv = *reinterpret_cast<const float4*>(&xs[d][4 * ty]);
      const float xr[4] = {xv.x, xv.y, xv.z, xv.w};
#pragma unroll
      for (int mat = 0; mat <= kGated; ++mat) {
        const float4 wv = *reinterpret_cast<const float4*>(&ws[mat][d][4 * tx]);
        const float wr[4] = {wv.x, wv.y, wv.z, wv.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[mat][i][j] = fmaf(wr[j], xr[i], sums[mat][i][j]);
        }
      }
    }
    __syncthreads();  // all threads have read the tiles
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = first_row + 4 * ty + i, row_of_w = first_w + 4 * tx + j;
      if (row >= p.rows || row_of_w >= p.n) continue;
      const int64_t at = matrix * p.y_batch_stride + row * p.y_stride + row_of_w;
      if constexpr (kGated) {
        store_gated(p, 0, row_of_w, at, sums[0][i][j], sums[1][i][j]);
      } else {
        store_product(p, 0, row_of_w, at, sums[0][i][j]);
      }
    }
  }
}

template <DType kType>
void exact(const Problem& p, CUstream_st* stream) {
  if constexpr (kType == DType::f32) {
    if (fits_exact_f32(p)) return exact_f32(p, stream);
  }
  const bool experts = p.grouping == Grouping::experts;
  if (!experts && p.rows > 8) {
    const dim3 grid(static_cast<unsigned>((p.rows + 63) / 64), static_cast<unsigned>((p.n + 63) / 64),
                    static_cast<unsigned>(p.matrices));
    const auto kernel = p.gated() ? exact_tiles_kernel<kType, true> : exact_tiles_kernel<kType, false>;
    kernel<<<grid, 256, 0, stream>>>(p);
    return;
  }
  const dim3 grid(static_cast<unsigned>((p.n + 7) / 8), static_cast<unsigned>(experts ? p.rows : 1),
                  static_cast<unsigned>(experts ? 1 : p.matrices));
  launch_dependent("matmul", exact_rows_kernel<kType>, grid, 256, 0, stream, p);
}

}  // namespace dyno::ops::cuda
