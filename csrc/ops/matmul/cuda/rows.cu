// Converts f32 rows to f16 rows.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/cuda/stream_rows.cuh"

namespace dyno::ops::cuda {
namespace {

// One block per row. The scale is a power of two, so division by it is exact. The norm's weights do not depend on
// launches that are still running, but most rows are too long to keep them in registers.
template <bool kNorm>
__global__ void __launch_bounds__(256) halve_rows_kernel(HalfRows format, const uint8_t* x, int64_t x_stride,
                                                         int64_t x_batch_stride, int k, RowNorm norm, uint8_t* out) {
  device::let_next_start();
  device::wait_for_previous();
  __shared__ float shared[2][32];
  const int padded = (k + kGpuTile - 1) / kGpuTile * kGpuTile, passes = format.passes;
  uint8_t* to = out + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * format.row_bytes(k);
  const float* row = reinterpret_cast<const float*>(x + blockIdx.y * x_batch_stride + blockIdx.x * x_stride);
  float max = 0, squares = 0;
  const auto weighed = [&](int at) {
    float2 v = *reinterpret_cast<const float2*>(row + at);
    if constexpr (kNorm) {
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
      if (norm.weight != nullptr) v.x *= norm.weight[at], v.y *= norm.weight[at + 1];
    }
    return v;
  };
  for (int at = threadIdx.x * 2; at < k; at += 512) {
    const float2 v = weighed(at);
    max = fmaxf(max, fmaxf(fabsf(v.x), fabsf(v.y)));
  }
  float factor = 1.0f;
  if constexpr (kNorm) factor = 1.0f / sqrtf(device::block_sum(squares, shared[0]) / static_cast<float>(k) + norm.eps);
  const float largest = device::block_max(max, shared[1]) * factor;
  const float scale = format.bf16 ? 1.0f : row_scale(largest);
  const float inverse = factor / scale;
  for (int at = threadIdx.x * 2; at < padded; at += 512) {
    const float2 v = at < k ? weighed(at) : make_float2(0, 0);
    if (format.bf16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x * inverse, v.y * inverse);
      *reinterpret_cast<__nv_bfloat162*>(to + at * 2) = pair;
      continue;
    }
    const uint32_t halves = device::pack_half2(v.x * inverse, v.y * inverse);
    *reinterpret_cast<uint32_t*>(to + at * 2) = halves;
    if (passes == 2) {
      const float2 taken = __half22float2(device::as_half2(halves));
      *reinterpret_cast<uint32_t*>(to + (padded + at) * 2) =
          device::pack_half2(v.x * inverse - taken.x, v.y * inverse - taken.y);
    }
  }
  if (threadIdx.x == 0) *reinterpret_cast<float*>(to + passes * padded * 2) = scale;
}

}  // namespace

void halve_rows(HalfRows format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, int64_t rows,
                int64_t batch, int64_t k, uint8_t* out, CUstream_st* stream, const RowNorm& norm) {
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(batch));
  const auto kernel = norm.normed ? halve_rows_kernel<true> : halve_rows_kernel<false>;
  launch_dependent("copy", kernel, grid, 256, 0, stream, format, x, x_stride, x_batch_stride, static_cast<int>(k), norm,
                   out);
}

}  // namespace dyno::ops::cuda
