// Converts f32 rows to f16 rows, for experts in the launch that groups them.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/group_rows.cuh"
#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/cuda/stream_rows.cuh"

namespace dyno::ops::cuda {
namespace {

constexpr int kFewRowThreads = 128, kMostRowThreads = 256;  // for a row

// Converts one row, with all kThreads threads of a block. The scale is a power of two, so division by it is exact. The
// norm's weights do not depend on launches that are still running, but most rows are too long to keep them in
// registers.
template <bool kNorm, int kThreads>
__device__ __forceinline__ void halve_row(HalfRows format, const float* row, int k, RowNorm norm, uint8_t* to) {
  __shared__ float shared[2][32];
  const int padded = (k + kGpuTile - 1) / kGpuTile * kGpuTile, passes = format.passes;
  const int first = 2 * static_cast<int>(threadIdx.x);
  float max = 0, squares = 0;
  const auto weighed = [&](int at) {
    float2 v = *reinterpret_cast<const float2*>(row + at);
    if constexpr (kNorm) {
      squares = fmaf(v.x, v.x, fmaf(v.y, v.y, squares));
      if (norm.weight != nullptr) v.x *= norm.weight[at], v.y *= norm.weight[at + 1];
    }
    return v;
  };
  for (int at = first; at < k; at += 2 * kThreads) {
    const float2 v = weighed(at);
    max = fmaxf(max, fmaxf(fabsf(v.x), fabsf(v.y)));
  }
  float factor = 1.0f;
  if constexpr (kNorm) factor = 1.0f / sqrtf(device::block_sum(squares, shared[0]) / static_cast<float>(k) + norm.eps);
  const float largest = device::block_max(max, shared[1]) * factor;
  const float scale = format.bf16 ? 1.0f : row_scale(largest);
  const float inverse = factor / scale;
  for (int at = first; at < padded; at += 2 * kThreads) {
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

// One block per row.
template <bool kNorm, int kThreads>
__global__ void __launch_bounds__(kThreads)
    halve_rows_kernel(HalfRows format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, int k, RowNorm norm,
                      uint8_t* out) {
  device::let_next_start();
  device::wait_for_previous();
  uint8_t* to = out + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * format.row_bytes(k);
  const uint8_t* row = x + blockIdx.y * x_batch_stride + blockIdx.x * x_stride;
  halve_row<kNorm, kThreads>(format, reinterpret_cast<const float*>(row), k, norm, to);
}

// The first blocks group the rows of p by expert, and the others convert its rows of x.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    halve_and_group_kernel(HalfRows format, const __grid_constant__ Problem p, int tile_rows, uint8_t* out) {
  device::let_next_start();
  device::wait_for_previous();
  extern __shared__ int32_t counts[];
  const int blocks = group_blocks(p, kThreads), index = static_cast<int>(blockIdx.x);
  if (index < blocks) return group_rows_block(p, index, tile_rows, counts);
  const int64_t row = index - blocks;
  halve_row<false, kThreads>(format, reinterpret_cast<const float*>(p.x + row * p.x_stride), p.k, {},
                             out + row * format.row_bytes(p.k));
}

// Few threads for short rows, so that more rows are converted at once.
bool is_short(int64_t k) { return k <= 1024; }

}  // namespace

void halve_rows(HalfRows format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, int64_t rows,
                int64_t batch, int64_t k, uint8_t* out, CUstream_st* stream, const RowNorm& norm) {
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(batch));
  const bool few = is_short(k);
  const auto kernel = norm.normed
                          ? few ? halve_rows_kernel<true, kFewRowThreads> : halve_rows_kernel<true, kMostRowThreads>
                      : few ? halve_rows_kernel<false, kFewRowThreads>
                            : halve_rows_kernel<false, kMostRowThreads>;
  launch_dependent("copy", kernel, grid, few ? kFewRowThreads : kMostRowThreads, 0, stream, format, x, x_stride,
                   x_batch_stride, static_cast<int>(k), norm, out);
}

void halve_and_group(HalfRows format, const Problem& p, int64_t rows, int tile_rows, uint8_t* out,
                     CUstream_st* stream) {
  const int threads = is_short(p.k) ? kFewRowThreads : kMostRowThreads;
  const auto kernel = is_short(p.k) ? halve_and_group_kernel<kFewRowThreads> : halve_and_group_kernel<kMostRowThreads>;
  const dim3 grid(static_cast<unsigned>(group_blocks(p, threads) + rows));
  launch_dependent("matmul_id", kernel, grid, static_cast<unsigned>(threads),
                   static_cast<size_t>(p.matrices) * sizeof(int32_t), stream, format, p, tile_rows, out);
}

}  // namespace dyno::ops::cuda
