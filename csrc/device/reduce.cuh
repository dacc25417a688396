// Sums and maxima over a warp or a block, in a fixed order, so that results are bit-exact.
#pragma once

namespace dyno::device {

inline constexpr unsigned kFullMask = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
}

// Maximum and minimum of unsigned numbers, in one instruction on chips that have it.
__device__ __forceinline__ unsigned warp_max_unsigned(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFullMask, value);
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
#endif
}
// For non-negative numbers, whose bit patterns have the same order.
__device__ __forceinline__ float warp_max_positive(float value) {
  return __uint_as_float(warp_max_unsigned(__float_as_uint(value)));
}
__device__ __forceinline__ unsigned warp_min_unsigned(unsigned value) { return ~warp_max_unsigned(~value); }

// Every thread gets the sum. `shared` has one float per warp; two reductions in sequence need two arrays.
__device__ __forceinline__ float block_sum(float value, float* shared) {
  value = warp_sum(value);
  const int warps = (blockDim.x + 31) / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32;
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // the sums of all warps are written
  return warp_sum(lane < warps ? shared[lane] : 0.0f);
}

__device__ __forceinline__ float block_max(float value, float* shared) {
  value = warp_max(value);
  const int warps = (blockDim.x + 31) / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32;
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // the maxima of all warps are written
  return warp_max(lane < warps ? shared[lane] : shared[0]);
}

}  // namespace dyno::device
