// The weighted sum over a token's experts, slot by slot in order: a thread sums one column (or four).
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/moe_sum/kernels_cuda.h"

namespace dyno::ops {
namespace {

template <typename T>
__device__ __forceinline__ T zero();
template <>
__device__ __forceinline__ float zero<float>() {
  return 0.0f;
}
template <>
__device__ __forceinline__ float4 zero<float4>() {
  return make_float4(0, 0, 0, 0);
}
__device__ __forceinline__ float multiply_add(float x, float w, float sum) { return fmaf(x, w, sum); }
__device__ __forceinline__ float4 multiply_add(float4 x, float w, float4 sum) {
  return make_float4(fmaf(x.x, w, sum.x), fmaf(x.y, w, sum.y), fmaf(x.z, w, sum.z), fmaf(x.w, w, sum.w));
}

// `columns`: in values of T.
template <typename T>
__global__ void __launch_bounds__(256) moe_sum_columns(MoeSumArgs args, int columns, int used) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t token = blockIdx.x;
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  const int64_t first = token * used * columns + column;
  const T* mine = reinterpret_cast<const T*>(args.x) + first;
  const T* others = args.other_x == nullptr ? nullptr : reinterpret_cast<const T*>(args.other_x) + first;
  const float* weights = args.weights == nullptr ? nullptr : args.weights + token * used;
  T sum = zero<T>();
  for (int slot = 0; slot < used; ++slot) {
    const bool other = args.other_ids != nullptr && args.other_ids[token * used + slot] >= 0;
    if (other && others == nullptr) continue;
    sum =
        multiply_add((other ? others : mine)[int64_t{slot} * columns], weights == nullptr ? 1.0f : weights[slot], sum);
  }
  const int64_t at = token * columns + column;
  const T base = args.residual == nullptr ? zero<T>() : reinterpret_cast<const T*>(args.residual)[at];
  reinterpret_cast<T*>(args.out)[at] = multiply_add(sum, args.scale, base);
}

}  // namespace

void moe_sum_columns_cuda(const MoeSumArgs& args, const MoeSumDesc& desc, int threads, CudaStream& stream) {
  const auto address = reinterpret_cast<uintptr_t>(args.x) | reinterpret_cast<uintptr_t>(args.other_x) |
                       reinterpret_cast<uintptr_t>(args.residual) | reinterpret_cast<uintptr_t>(args.out);
  const bool vector = desc.n % 4 == 0 && address % 16 == 0;
  const int columns = static_cast<int>(vector ? desc.n / 4 : desc.n), used = static_cast<int>(desc.used);
  const dim3 grid(static_cast<unsigned>(desc.m), static_cast<unsigned>((columns + threads - 1) / threads));
  const auto kernel = vector ? moe_sum_columns<float4> : moe_sum_columns<float>;
  launch_dependent("moe_sum", kernel, grid, static_cast<unsigned>(threads), 0, stream.handle, args, columns, used);
}

}  // namespace dyno::ops
