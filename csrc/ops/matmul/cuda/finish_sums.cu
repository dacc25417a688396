#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "ops/matmul/cuda/blas.h"
#include "ops/matmul/cuda/epilogue.cuh"

namespace dyno::ops::cuda {
namespace {

// A thread per column of y, and a block row per row.
__global__ void __launch_bounds__(256)
    finish_sums_kernel(const Problem p, const float* sums, const float* sums_up, bool half_rows) {
  const int column = blockIdx.y * 256 + threadIdx.x, row = blockIdx.x;
  if (column >= p.n) return;
  const int64_t matrix = blockIdx.z, from = (matrix * p.rows + row) * p.n + column;
  float scale = 1.0f;
  if (half_rows) {
    const uint8_t* x = p.x + matrix * p.x_batch_stride + row * p.x_stride;
    scale = *reinterpret_cast<const float*>(x + p.passes * ((p.k + 63) / 64 * 128));
  }
  const int64_t at = matrix * p.y_batch_stride + row * p.y_stride + column;
  if (p.gated()) {
    store_gated(p, 0, column, at, sums[from] * scale, sums_up[from] * scale);
  } else {
    store_product(p, 0, column, at, sums[from] * scale);
  }
}

}  // namespace

void finish_sums(const Problem& p, const float* sums, const float* sums_up, bool half_rows, CUstream_st* stream) {
  const dim3 grid(static_cast<unsigned>(p.rows), static_cast<unsigned>((p.n + 255) / 256),
                  static_cast<unsigned>(p.matrices));
  finish_sums_kernel<<<grid, 256, 0, stream>>>(p, sums, sums_up, half_rows);
  DYNO_LAUNCH_CHECK("matmul");
}

}  // namespace dyno::ops::cuda
