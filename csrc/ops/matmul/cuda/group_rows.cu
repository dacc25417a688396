// Sorts (token, slot) rows by expert.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {
namespace {

constexpr int kRowsEach = 8;  // rows per warp that zeroes rows

// Zeroes the rows of y without an expert, among this warp's rows. Lanes take columns.
__device__ __forceinline__ void zero_rows(const Problem& p, int first) {
  const int lane = threadIdx.x & 31;
  const int id = lane < kRowsEach && first + lane < p.rows ? p.ids[first + lane] : 0;
  for (int i = 0; i < kRowsEach; ++i) {
    if (__shfl_sync(device::kFullMask, id, i) >= 0) continue;
    float* y = p.y + (first + i) * p.y_stride;
    for (int column = lane; column < p.n; column += 32) y[column] = 0;
  }
}

// Block 0 sorts, with counts in shared memory. The order within an expert does not matter, because rows of a product
// are independent. The other blocks zero rows.
__global__ void __launch_bounds__(1024) group_rows_kernel(const __grid_constant__ Problem p, int tile_rows) {
  device::wait_for_previous();
  if (blockIdx.x > 0) {
    const int warps = blockDim.x / 32;
    return zero_rows(p, ((blockIdx.x - 1) * warps + threadIdx.x / 32) * kRowsEach);
  }
  const int32_t* ids = p.ids;
  const int rows = p.rows, matrices = p.matrices;
  int32_t* groups = p.groups;
  extern __shared__ int32_t counts[];  // [matrices], then the next free index of each matrix
  for (int i = threadIdx.x; i < matrices; i += blockDim.x) counts[i] = 0;
  __syncthreads();  // counts are zero
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    if (ids[i] >= 0) atomicAdd(&counts[ids[i]], 1);
  }
  __syncthreads();  // counts are complete
  int32_t* first_tile = groups;
  int32_t* first_row = groups + matrices + 1;
  int32_t* order = groups + 2 * (matrices + 1);
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
  for (int i = threadIdx.x; i < rows; i += blockDim.x) {
    if (ids[i] >= 0) order[atomicAdd(&counts[ids[i]], 1)] = i;
  }
}

}  // namespace

void group_rows(const Problem& p, int tile_rows, CUstream_st* stream) {
  const int threads = p.rows >= 4096 ? 1024 : 256, rows = threads / 32 * kRowsEach;
  launch_dependent("matmul_id", group_rows_kernel, dim3(static_cast<unsigned>(1 + (p.rows + rows - 1) / rows)),
                   static_cast<unsigned>(threads), static_cast<size_t>(p.matrices) * sizeof(int32_t), stream, p,
                   tile_rows);
}

}  // namespace dyno::ops::cuda
