#include "runtime/cuda/rows.h"

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"

namespace dyno::runtime {
namespace {

// A thread moves one column through all rows in ascending order, so no value is overwritten before it is read.
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

// The largest of some logits (the first one of equals), and the sum of exp(logit - largest) over all of them.
struct Largest {
  float value;
  int32_t at;
  float sum;
};

__device__ Largest larger_of(const Largest& a, const Largest& b) {
  if (a.sum == 0) return b;
  if (b.sum == 0) return a;
  const bool first = a.value > b.value || (a.value == b.value && a.at < b.at);
  const Largest &most = first ? a : b, &other = first ? b : a;
  return {most.value, most.at, most.sum + other.sum * expf(other.value - most.value)};
}

constexpr int kRowThreads = 1024;

// One block per row.
__global__ void find_likely_kernel(const float* logits, int64_t n_vocab, Likely* likely) {
  __shared__ Largest parts[kRowThreads];
  device::let_next_start();
  device::wait_for_previous();
  const float* row = logits + blockIdx.x * n_vocab;
  Largest own{-INFINITY, INT32_MAX, 0.0f};
  bool finite = true;
  for (auto i = static_cast<int64_t>(threadIdx.x); i < n_vocab; i += kRowThreads) {
    const float x = row[i];
    finite &= x < INFINITY;  // false for NaN, too
    if (x > own.value) {
      own = {x, static_cast<int32_t>(i), own.sum * expf(own.value - x) + 1.0f};
    } else if (x > -INFINITY) {
      own.sum += expf(x - own.value);
    }
  }
  parts[threadIdx.x] = own;
  finite = __syncthreads_and(finite) != 0;
  for (int half = kRowThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] = larger_of(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  const Largest most = parts[0];
  const bool known = finite && most.sum > 0;
  likely[blockIdx.x].token = known ? most.at : -1;
  likely[blockIdx.x].probability = known ? 1.0f / most.sum : 0.0f;
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

void find_likely(const float* logits, int64_t rows, int64_t n_vocab, Likely* likely, CUstream_st* stream) {
  launch_dependent("find_likely", find_likely_kernel, static_cast<unsigned>(rows), kRowThreads, 0, stream, logits,
                   n_vocab, likely);
}

}  // namespace dyno::runtime
