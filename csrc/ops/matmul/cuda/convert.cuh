// Layout::gpu from plain weights, and half rows from Layout::gpu.
#pragma once

#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/cuda/weight_tile.cuh"
#include "ops/matmul/gpu_pack.h"

namespace dyno::ops::cuda {

// A thread makes one word of the unit (blockIdx.x) of the stripe (blockIdx.y).
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

// A warp for each tile; rows leave through shared memory as 128-byte runs.
template <DType kType>
__global__ void __launch_bounds__(256) to_half_kernel(const uint8_t* w, uint16_t* out, int64_t n, int64_t k) {
  __shared__ uint32_t staged[8][kGpuRows][kGpuTile / 2 + 4];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tiles = static_cast<int>((k + kGpuTile - 1) / kGpuTile), tile = blockIdx.x * 8 + warp;
  if (tile >= tiles) return;
  const int64_t stripe = blockIdx.y;
  WeightTile<kType> data;
  data.load(typename WeightTile<kType>::Cursor(w + stripe * gpu_stripe_bytes(kType, k), tile, lane));
  for_each_step([&]<int kStep>() {
    uint32_t a[4];
    data.template fragment<kStep>(a);
#pragma unroll
    for (int j = 0; j < 4; ++j) staged[warp][g + 8 * (j & 1)][8 * kStep + t + 4 * (j >> 1)] = a[j];
  });
  __syncwarp();  // the warp's tile is complete
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = stripe * kGpuRows + i * 4 + lane / 8, at = static_cast<int64_t>(tile) * kGpuTile + lane % 8 * 8;
    if (row < n && at < k) {
      *reinterpret_cast<uint4*>(out + row * k + at) =
          *reinterpret_cast<const uint4*>(&staged[warp][i * 4 + lane / 8][lane % 8 * 4]);
    }
  }
}

template <DType kType>
void to_half(const uint8_t* w, uint16_t* out, int64_t n, int64_t k, CUstream_st* stream) {
  const dim3 grid(static_cast<unsigned>((k + 511) / 512), static_cast<unsigned>((n + kGpuRows - 1) / kGpuRows));
  to_half_kernel<kType><<<grid, 256, 0, stream>>>(w, out, n, k);
}

}  // namespace dyno::ops::cuda
