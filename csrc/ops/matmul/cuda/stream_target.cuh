// The blocks of `stream`: their products, and the results that they store.
#pragma once

#include <cuda_runtime.h>

#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/stripes.h"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

// Whether all rows of x are of one token. Rows of experts that do not share a row of x may be of several.
constexpr bool has_one_token(const Problem& p) {
  return p.rows == (p.grouping == Grouping::summed ? p.used : p.grouping == Grouping::experts ? p.x_divisor : 1);
}

// The product of a block.
struct StreamTarget {
  const uint8_t* w;
  const float* bias;
  float* y;
  int64_t y_stride;
  int n, stripe;
};

// The product of block blockIdx.x: each part has separate blocks, in sequence. Returns its index; 0 is p itself.
template <int kStripes>
__device__ __forceinline__ int stream_target(const Problem& p, StreamTarget& target) {
  int block = blockIdx.x, part = 0;
  target = {p.w, p.bias, p.y, p.y_stride, p.n, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int blocks = static_cast<int>(stream_blocks(target.n, kStripes));
    if (p.more[i].n == 0 || block < blocks) break;
    block -= blocks;
    target = {p.more[i].w, p.more[i].bias, p.more[i].y, p.more[i].y_stride, p.more[i].n, 0};
    part = i + 1;
  }
  target.stripe = kStripes == kTrio ? block / 2 * 3 + block % 2 * 2 : block * kStripes;
  return part;
}

// The blocks of a launch: of the stripes of all parts, of the rows, and of the matrices of a batch.
inline dim3 stream_grid(const Problem& p, int stripes) {
  const bool experts = p.grouping == Grouping::experts, summed = p.grouping == Grouping::summed;
  int64_t blocks = stream_blocks(p.n, stripes);
  for (const Part& part : p.more) blocks += stream_blocks(part.n, stripes);
  const int rows = summed ? p.rows / p.used : experts ? p.rows : (p.rows + 7) / 8;
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(rows),
              static_cast<unsigned>(experts || summed ? 1 : p.matrices));
}

// Zeroes the elements of row `row` of y that the block has: the row has no matrix.
template <int kMats>
__device__ __forceinline__ void zero_stream(const Problem& p, const StreamTarget& target, int row) {
  const int rows = (p.gated() ? 1 : kMats) * kGpuRows,
            column = target.stripe * kGpuRows + static_cast<int>(threadIdx.x);
  if (static_cast<int>(threadIdx.x) < rows && column < target.n) target.y[row * target.y_stride + column] = 0;
}

// Stores the sums of row `row_of_w` of the block's first stripe, and of the same row of its second one (gated: of both
// matrices). `base`: elements of the residual; y_at: index of the row of y.
template <int kMats, bool kSummed>
__device__ __forceinline__ void store_stream(const Problem& p, const StreamTarget& target, int matrix, int first_row,
                                             int row_of_w, int64_t y_at, const float (&base)[kMats],
                                             float (&total)[kMats]) {
  const bool experts = p.grouping == Grouping::experts;
  if constexpr (kSummed) {
#pragma unroll
    for (int i = 0; i < kMats; ++i) {
      const int row = row_of_w + i * kGpuRows;
      if (row >= p.n) return;
      if (p.bias != nullptr) {
        for (int slot = 0; slot < p.used; ++slot) {
          const int64_t expert = p.ids[first_row + slot];
          total[i] += p.slot_weights[first_row + slot] * p.bias[expert * p.n + row];
        }
      }
      p.y[y_at + row] = base[i] + p.scale * total[i];
    }
    return;
  }
  const int64_t bias_of = experts ? static_cast<int64_t>(matrix) * p.n : 0;
  if constexpr (kMats == 2) {
    if (p.gated()) {
      if (row_of_w < p.n) store_gated(p, experts ? matrix : 0, row_of_w, y_at + row_of_w, total[0], total[1]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kMats; ++i) {
    const int row = row_of_w + i * kGpuRows;
    if (row >= target.n) continue;
    float sum = total[i];
    if (target.bias != nullptr) sum += target.bias[bias_of + row];
    target.y[y_at + row] = base[i] + sum * p.scale;
  }
}

}  // namespace dyno::ops::cuda
