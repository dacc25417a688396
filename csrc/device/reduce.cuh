// Sums and maxima over a warp and over a block, in a fixed order: the same bits every time.
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

// Largest and smallest of unsigned numbers, one instruction where a chip has it.
__device__ __forceinline__ unsigned warp_max_unsigned(unsigned value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFullMask, value);
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(kFullMask, value, offset));
  return value;
#endif
}
// Of numbers that are not negative, whose bits are ordered as they are.
__device__ __forceinline__ float warp_max_positive(float value) {
  return __uint_as_float(warp_max_unsigned(__float_as_uint(value)));
}
__device__ __forceinline__ unsigned warp_min_unsigned(unsigned value) { return ~warp_max_unsigned(~value); }

// Every thread gets the sum. `shared` holds one float a warp; a caller that reduces twice uses two of them.
__device__ __forceinline__ float block_sum(float value, float* shared) {
  value = warp_sum(value);
  const int warps = (blockDim.x + 31) / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32;
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // all warps' sums are written
  return warp_sum(lane < warps ? shared[lane] : 0.0f);
}

__device__ __forceinline__ float block_max(float value, float* shared) {
  value = warp_max(value);
  const int warps = (blockDim.x + 31) / 32;
  if (warps == 1) return value;
  const int lane = threadIdx.x % 32;
  if (lane == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();  // all warps' maxima are written
  return warp_max(lane < warps ? shared[lane] : shared[0]);
}

}  // namespace dyno::device
