// Sorts (token, slot) rows by expert.
#include "ops/matmul/cuda/group_rows.cuh"

#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"

namespace dyno::ops::cuda {
namespace {

__global__ void __launch_bounds__(1024) group_rows_kernel(const __grid_constant__ Problem p, int tile_rows) {
  device::wait_for_previous();
  extern __shared__ int32_t counts[];
  group_rows_block(p, static_cast<int>(blockIdx.x), tile_rows, counts);
}

}  // namespace

void group_rows(const Problem& p, int tile_rows, CUstream_st* stream) {
  const int threads = p.rows >= 4096 ? 1024 : 256;
  launch_dependent("matmul_id", group_rows_kernel, dim3(static_cast<unsigned>(group_blocks(p, threads))),
                   static_cast<unsigned>(threads), static_cast<size_t>(p.matrices) * sizeof(int32_t), stream, p,
                   tile_rows);
}

}  // namespace dyno::ops::cuda
