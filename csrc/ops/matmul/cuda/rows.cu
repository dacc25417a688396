// Half rows from f32 rows, and the sorting of (token, slot) rows by expert.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/cuda/stream_rows.cuh"

namespace dyno::ops::cuda {
namespace {

// A block for each row. The scale is a power of two, so dividing by it is exact.
__global__ void __launch_bounds__(256) halve_rows_kernel(HalfRows format, const uint8_t* x, int64_t x_stride,
                                                         int64_t x_batch_stride, int k, uint8_t* out) {
  device::let_next_start();
  device::wait_for_previous();
  __shared__ float shared[32];
  const int padded = (k + kGpuTile - 1) / kGpuTile * kGpuTile, passes = format.passes;
  uint8_t* to = out + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * format.row_bytes(k);
  const float* row = reinterpret_cast<const float*>(x + blockIdx.y * x_batch_stride + blockIdx.x * x_stride);
  float max = 0;
  for (int at = threadIdx.x * 2; at < k; at += 512) {
    const float2 v = *reinterpret_cast<const float2*>(row + at);
    max = fmaxf(max, fmaxf(fabsf(v.x), fabsf(v.y)));
  }
  const float largest = device::block_max(max, shared);
  const float scale = format.bf16 ? 1.0f : row_scale(largest);
  const float inverse = 1.0f / scale;
  for (int at = threadIdx.x * 2; at < padded; at += 512) {
    const float2 v = at < k ? *reinterpret_cast<const float2*>(row + at) : make_float2(0, 0);
    if (format.bf16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x, v.y);
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

// One block. Counts in shared memory; the order within an expert does not matter, because rows of a product are
// independent of each other.
__global__ void __launch_bounds__(1024)
    group_rows_kernel(const int32_t* ids, int rows, int matrices, int tile_rows, int32_t* groups) {
  extern __shared__ int32_t counts[];  // [matrices], then the next free place of each
  for (int i = threadIdx.x; i < matrices; i += blockDim.x) counts[i] = 0;
  __syncthreads();  // counts are zero
  for (int i = threadIdx.x; i < rows; i += blockDim.x) atomicAdd(&counts[ids[i]], 1);
  __syncthreads();  // counts are complete
  int32_t* first_tile = groups;
  int32_t* first_row = groups + matrices + 1;
  int32_t* order = groups + 2 * (matrices + 1);
  if (threadIdx.x < 32) {
    // Running sums of both, 32 experts at a time.
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
  __syncthreads();  // first places are known
  for (int i = threadIdx.x; i < rows; i += blockDim.x) order[atomicAdd(&counts[ids[i]], 1)] = i;
}

}  // namespace

void halve_rows(HalfRows format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, int64_t rows,
                int64_t batch, int64_t k, uint8_t* out, CUstream_st* stream) {
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(batch));
  launch_dependent("copy", halve_rows_kernel, grid, 256, 0, stream, format, x, x_stride, x_batch_stride,
                   static_cast<int>(k), out);
}

void group_rows(const Problem& p, int tile_rows, CUstream_st* stream) {
  const int threads = p.rows >= 4096 ? 1024 : 256;
  group_rows_kernel<<<1, threads, static_cast<size_t>(p.matrices) * sizeof(int32_t), stream>>>(
      p.ids, p.rows, p.matrices, tile_rows, p.groups);
  DYNO_LAUNCH_CHECK("matmul_id");
}

}  // namespace dyno::ops::cuda
