// Rows of x on their way to the tiles of f16 values that kernels with wide tiles read.
#pragma once

#include <cuda_runtime.h>

#include "device/ptx.cuh"

namespace dyno::ops::cuda {

// Eight adjacent values of a row; zeros beyond k. `quads`: addresses allow loads of 16 bytes.
struct Chunk {
  float v[8];

  Chunk() = default;
  __device__ __forceinline__ Chunk(const float* row, int at, int k, bool quads) {
    if (quads) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four =
            at + 4 * i < k ? *reinterpret_cast<const float4*>(row + at + 4 * i) : make_float4(0, 0, 0, 0);
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = at + 2 * i < k ? *reinterpret_cast<const float2*>(row + at + 2 * i) : make_float2(0, 0);
        v[2 * i] = two.x, v[2 * i + 1] = two.y;
      }
    }
  }
  __device__ __forceinline__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
    return sum;
  }
  __device__ __forceinline__ void multiply(const Chunk& by) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= by.v[i];
  }
  __device__ __forceinline__ float largest(float so_far) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) so_far = fmaxf(so_far, fabsf(v[i]));
    return so_far;
  }
  // Writes the f16 values of v·inverse, and their rests if `rest` is not null. Returns the sum of the f16 values.
  __device__ __forceinline__ float put(float inverse, uint8_t* to, uint8_t* rest) const {
    uint32_t halves[4];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      halves[i] = device::pack_half2(v[2 * i] * inverse, v[2 * i + 1] * inverse);
      const float2 taken = __half22float2(device::as_half2(halves[i]));
      sum += taken.x + taken.y;
    }
    *reinterpret_cast<uint4*>(to) = {halves[0], halves[1], halves[2], halves[3]};
    if (rest == nullptr) return sum;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 taken = __half22float2(device::as_half2(halves[i]));
      halves[i] = device::pack_half2(v[2 * i] * inverse - taken.x, v[2 * i + 1] * inverse - taken.y);
    }
    *reinterpret_cast<uint4*>(rest) = {halves[0], halves[1], halves[2], halves[3]};
    return sum;
  }
};

}  // namespace dyno::ops::cuda
