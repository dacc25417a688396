// Repacks plain weights to Layout::gpu.
#pragma once

#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/gpu_pack.h"

namespace dyno::ops::cuda {

// A thread computes one word of the unit (blockIdx.x) of the stripe (blockIdx.y).
template <DType kType>
__global__ void __launch_bounds__(256) repack_kernel(const uint8_t* plain, uint8_t* out, int64_t n, int64_t k) {
  constexpr GpuFormat f = gpu_format(kType);
  const FileRows<kType> rows{plain + blockIdx.z * (n * k / kFileBlock<kType> * sizeof(typename FileBlock<kType>::Type)),
                             n, k};
  const int64_t stripe = blockIdx.y, stripes = gridDim.y, units = gridDim.x, unit = blockIdx.x;
  uint32_t* at = reinterpret_cast<uint32_t*>(out + ((blockIdx.z * stripes + stripe) * units + unit) * f.unit_bytes());
  for (int word = threadIdx.x; word < f.unit_bytes() / 4; word += blockDim.x) {
    at[word] = pack_word<kType>(rows, stripe * kGpuRows, unit * f.unit_k(), word);
  }
}

template <DType kType>
void repack(const uint8_t* plain, uint8_t* out, int64_t matrices, int64_t n, int64_t k, CUstream_st* stream) {
  constexpr GpuFormat f = gpu_format(kType);
  const int64_t stripes = (n + kGpuRows - 1) / kGpuRows, units = (k + f.unit_k() - 1) / f.unit_k();
  const dim3 grid(static_cast<unsigned>(units), static_cast<unsigned>(stripes), static_cast<unsigned>(matrices));
  repack_kernel<kType><<<grid, 256, 0, stream>>>(plain, out, n, k);
}

}  // namespace dyno::ops::cuda
