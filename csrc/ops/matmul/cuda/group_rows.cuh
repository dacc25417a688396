// Parts of a launch that sorts (token, slot) rows by expert.
#pragma once

#include "device/reduce.cuh"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

inline constexpr int kZeroedRows = 8;  // rows per warp that zeroes rows

// Zeroes the rows of y without an expert, among this warp's rows. Lanes take columns.
__device__ __forceinline__ void zero_rows(const Problem& p, int first) {
  const int lane = threadIdx.x & 31;
  const int id = lane < kZeroedRows && first + lane < p.rows ? p.ids[first + lane] : 0;
  for (int i = 0; i < kZeroedRows; ++i) {
    if (__shfl_sync(device::kFullMask, id, i) >= 0) continue;
    float* y = p.y + (first + i) * p.y_stride;
    for (int column = lane; column < p.n; column += 32) y[column] = 0;
  }
}

// Calls use(row, id) for each row with an expert. A thread loads several ids at a time, because loads cannot pass the
// atomic operations of `use`.
template <typename Use>
__device__ __forceinline__ void for_each_id(const Problem& p, const Use& use) {
  constexpr int kAtOnce = 8;
  const int threads = static_cast<int>(blockDim.x);
  for (int first = threadIdx.x; first < p.rows; first += kAtOnce * threads) {
    int32_t ids[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) ids[i] = first + i * threads < p.rows ? p.ids[first + i * threads] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (ids[i] >= 0) use(first + i * threads, ids[i]);
    }
  }
}

// One block sorts, with counts in shared memory: [matrices], then the next free index of each matrix. The order within
// an expert does not matter, because rows of a product are independent.
__device__ __forceinline__ void sort_rows(const Problem& p, int tile_rows, int32_t* counts) {
  const int matrices = p.matrices;
  for (int i = threadIdx.x; i < matrices; i += blockDim.x) counts[i] = 0;
  __syncthreads();  // counts are zero
  for_each_id(p, [&](int, int32_t id) { atomicAdd(&counts[id], 1); });
  __syncthreads();  // counts are complete
  int32_t* first_tile = p.groups;
  int32_t* first_row = p.groups + matrices + 1;
  int32_t* order = p.groups + 2 * (matrices + 1);
  if (threadIdx.x < 32) {
    // Prefix sums of both, 32 experts at a time.
    int tile_base = 0, row_base = 0;
    for (int base = 0; base < matrices; base += 32) {
      const int expert = base + threadIdx.x;
      const int count = expert < matrices ? counts[expert] : 0;
      int row_sum = count, tile_sum = (count + tile_rows - 1) / tile_rows;
      const int tiles = tile_sum;
      for (int offset = 1; offset < 32; offset *= 2) {
        const int row_before = __shfl_up_sync(device::kFullMask, row_sum, offset);
        const int tile_before = __shfl_up_sync(device::kFullMask, tile_sum, offset);
        if (threadIdx.x >= offset) row_sum += row_before, tile_sum += tile_before;
      }
      if (expert < matrices) {
        first_tile[expert] = tile_base + tile_sum - tiles;
        first_row[expert] = row_base + row_sum - count;
        counts[expert] = row_base + row_sum - count;
      }
      row_base += __shfl_sync(device::kFullMask, row_sum, 31);
      tile_base += __shfl_sync(device::kFullMask, tile_sum, 31);
    }
    if (threadIdx.x == 0) first_tile[matrices] = tile_base, first_row[matrices] = row_base;
  }
  __syncthreads();  // first indices are known
  for_each_id(p, [&](int row, int32_t id) { order[atomicAdd(&counts[id], 1)] = row; });
}

// Block `index` of the blocks that group rows: the first sorts, the others zero rows.
__device__ __forceinline__ void group_rows_block(const Problem& p, int index, int tile_rows, int32_t* counts) {
  if (index == 0) return sort_rows(p, tile_rows, counts);
  const int warps = static_cast<int>(blockDim.x) / 32;
  zero_rows(p, ((index - 1) * warps + static_cast<int>(threadIdx.x) / 32) * kZeroedRows);
}
// Their number.
constexpr int group_blocks(const Problem& p, int threads) {
  const int rows = threads / 32 * kZeroedRows;
  return 1 + (p.rows + rows - 1) / rows;
}

}  // namespace dyno::ops::cuda
