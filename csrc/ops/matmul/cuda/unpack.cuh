// Path `dequantize`: writes weights of Layout::gpu to memory, as rows or as tensor core fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "ops/matmul/cuda/problem.h"
#include "ops/matmul/cuda/weight_tile.cuh"
#include "ops/matmul/gpu_unpack.h"

namespace dyno::ops::cuda {

__device__ __forceinline__ uint32_t half2_to_bf162(uint32_t halves) {
  const float2 v = __half22float2(as_half2(halves));
  const __nv_bfloat162 pair = __floats2bfloat162_rn(v.x, v.y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The work of a warp: one stripe of one matrix. False: no work.
struct UnpackPlace {
  const uint8_t* stripe;
  int64_t out_matrix;  // index of the output matrix
  int64_t out_row;     // first output row of the stripe
  __device__ __forceinline__ bool find(const UnpackJob& job, int64_t stripe_bytes) {
    const int64_t matrix = job.first_matrix + blockIdx.z;
    if (job.first_place != nullptr && job.first_place[matrix] == job.first_place[matrix + 1]) return false;
    out_matrix = blockIdx.z;
    out_row = static_cast<int64_t>(blockIdx.y) * kGpuRows;
    stripe = job.w + matrix * job.w_stride + (job.first_row / kGpuRows + blockIdx.y) * stripe_bytes;
    return true;
  }
};

// f16 rows are written through shared memory in runs of 128 bytes; fragments are written directly.
template <DType kType, Unpacked kForm>
__global__ void __launch_bounds__(256) unpack_kernel(const UnpackJob job) {
  __shared__ uint32_t staged[kForm == Unpacked::fragments ? 1 : 8][kGpuRows][kGpuTile / 2 + 4];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tiles = static_cast<int>((job.k + kGpuTile - 1) / kGpuTile), tile = blockIdx.x * 8 + warp;
  constexpr bool kTiles = kForm == Unpacked::tiles_f16 || kForm == Unpacked::tiles_bf16;
  constexpr bool kBf16 = kForm == Unpacked::rows_bf16 || kForm == Unpacked::tiles_bf16;
  UnpackPlace place;
  if (tile >= tiles || !place.find(job, gpu_stripe_bytes(kType, job.k))) return;
  const bool pad = kTiles && place.out_row >= job.rows;  // padding of the last block
  WeightTile<kType> data;
  if (!pad) data.load(typename WeightTile<kType>::Cursor(place.stripe, tile, lane));
  if constexpr (kForm == Unpacked::fragments) {
    uint8_t* out = job.out + place.out_matrix * gpu_layout_bytes(DType::f16, job.rows, job.k) +
                   place.out_row / kGpuRows * gpu_stripe_bytes(DType::f16, job.k) + tile * 2048 + lane * 16;
    for_each_step([&]<int kStep>() {
      uint32_t a[4];
      data.template fragment<kStep>(a);
      *reinterpret_cast<uint4*>(out + kStep * 512) = {a[0], a[1], a[2], a[3]};
    });
  } else {
    for_each_step([&]<int kStep>() {
      uint32_t a[4];
      if (pad) {
        a[0] = a[1] = a[2] = a[3] = 0;
      } else if constexpr (kBf16 && kType == DType::bf16) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = data.low[4 * kStep + j];
      } else {
        data.template fragment<kStep>(a);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kBf16 && kType != DType::bf16) a[j] = half2_to_bf162(a[j]);
        staged[warp][g + 8 * (j & 1)][8 * kStep + t + 4 * (j >> 1)] = a[j];
      }
    });
    __syncwarp();  // the warp's tile is complete
    if constexpr (kTiles) {
      const int stripe = blockIdx.y, each = job.pair == 0 ? 4 : 2;  // stripes per block
      const int64_t blocks = gridDim.y / each, at = (place.out_matrix * blocks + stripe / each) * tiles + tile;
      uint8_t* out = job.out + at * 8192;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i * 4 + lane / 8, chunk = lane % 8;
        const int row =
            job.pair == 0 ? stripe % 4 * 16 + r : stripe % 2 * 32 + (r >> 3) * 16 + (job.pair == 2 ? 8 : 0) + (r & 7);
        *reinterpret_cast<uint4*>(out + row * 128 + ((chunk ^ (row & 7)) << 4)) =
            *reinterpret_cast<const uint4*>(&staged[warp][r][chunk * 4]);
      }
      return;
    }
    auto* out = reinterpret_cast<uint16_t*>(job.out) + place.out_matrix * job.rows * job.k;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = place.out_row + i * 4 + lane / 8, at = static_cast<int64_t>(tile) * kGpuTile + lane % 8 * 8;
      if (row < job.rows && at < job.k) {
        *reinterpret_cast<uint4*>(out + row * job.k + at) =
            *reinterpret_cast<const uint4*>(&staged[warp][i * 4 + lane / 8][lane % 8 * 4]);
      }
    }
  }
}

// float32 values as the file format defines them, one element per thread.
template <DType kType>
__global__ void __launch_bounds__(256) unpack_f32_kernel(const UnpackJob job) {
  constexpr GpuFormat f = gpu_format(kType);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  UnpackPlace place;
  if (at >= job.k || !place.find(job, gpu_stripe_bytes(kType, job.k))) return;
  float* out = reinterpret_cast<float*>(job.out) + (place.out_matrix * job.rows + place.out_row) * job.k + at;
  const int rows = static_cast<int>(min(job.rows - place.out_row, static_cast<int64_t>(kGpuRows)));
  for (int row = 0; row < rows; ++row) {
    out[row * job.k] =
        gpu_value<kType>(place.stripe + at / f.unit_k() * f.unit_bytes(), row, static_cast<int>(at % f.unit_k()));
  }
}

template <DType kType>
void unpack(const UnpackJob& job, Unpacked form, CUstream_st* stream) {
  const int64_t width = form == Unpacked::rows_f32 ? 256 : 8 * kGpuTile;  // of k, per block
  const bool tiles = form == Unpacked::tiles_f16 || form == Unpacked::tiles_bf16;
  const int64_t each = !tiles ? kGpuRows : job.pair == 0 ? 64 : 32;  // rows that are written together
  const dim3 grid(static_cast<unsigned>((job.k + width - 1) / width),
                  static_cast<unsigned>((job.rows + each - 1) / each * each / kGpuRows),
                  static_cast<unsigned>(job.matrices));
  switch (form) {
    case Unpacked::rows_f16:
      unpack_kernel<kType, Unpacked::rows_f16><<<grid, 256, 0, stream>>>(job);
      return;
    case Unpacked::rows_bf16:
      unpack_kernel<kType, Unpacked::rows_bf16><<<grid, 256, 0, stream>>>(job);
      return;
    case Unpacked::rows_f32:
      unpack_f32_kernel<kType><<<grid, 256, 0, stream>>>(job);
      return;
    case Unpacked::fragments:
      unpack_kernel<kType, Unpacked::fragments><<<grid, 256, 0, stream>>>(job);
      return;
    case Unpacked::tiles_f16:
      unpack_kernel<kType, Unpacked::tiles_f16><<<grid, 256, 0, stream>>>(job);
      return;
    case Unpacked::tiles_bf16:
      unpack_kernel<kType, Unpacked::tiles_bf16><<<grid, 256, 0, stream>>>(job);
      return;
  }
}

}  // namespace dyno::ops::cuda
