#include "runtime/cuda/rows.h"

#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"

namespace dyno::runtime {
namespace {

// A thread moves one column through all rows in ascending order, so nothing is overwritten before it was read.
__global__ void gather_rows_kernel(uint32_t* values, int64_t width, const int32_t* rows, int64_t count) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= width) return;
  for (int64_t i = 0; i < count; ++i) values[i * width + column] = values[rows[i] * width + column];
}

__global__ void soft_cap_kernel(float* values, int64_t count, float cap) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) values[i] = cap * tanhf(values[i] / cap);
}

constexpr unsigned kThreads = 256;
unsigned blocks_for(int64_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

}  // namespace

void gather_rows(std::byte* values, size_t row_bytes, const int32_t* rows, int64_t count, CUstream_st* stream) {
  const auto width = static_cast<int64_t>(row_bytes / 4);
  launch_dependent("gather_rows", gather_rows_kernel, blocks_for(width), kThreads, 0, stream,
                   reinterpret_cast<uint32_t*>(values), width, rows, count);
}

void soft_cap(float* values, int64_t count, float cap, CUstream_st* stream) {
  launch_dependent("soft_cap", soft_cap_kernel, blocks_for(count), kThreads, 0, stream, values, count, cap);
}

}  // namespace dyno::runtime
