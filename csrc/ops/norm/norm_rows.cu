// RMS norm or layer norm with `threads` threads per row. If a row has one warp, a block has eight rows.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/norm/kernels_cuda.h"

namespace dyno::ops {
namespace {

struct Row {
  const float* x;
  const float* weight;
  const float* residual;
  float* out;
};

__device__ __forceinline__ Row row_of(const NormArgs& args, int64_t n, int rows_per_token, int64_t row) {
  const int64_t token = row / rows_per_token, within = row % rows_per_token;
  return {args.x + token * args.x_stride + within * n,
          args.weight == nullptr ? nullptr : args.weight + within * args.weight_stride,
          args.residual == nullptr ? nullptr : args.residual + row * n,
          args.out + token * args.out_stride + within * n};
}

// `thread` is one of `threads` that share the row; `sum` adds a value over them. x may be out, because all reads of the
// first loop are complete before the sum is known.
template <bool Vector, typename Sum>
__device__ __forceinline__ void normalise(const NormArgs& args, const Row& row, int n, int thread, int threads,
                                          const Sum& sum) {
  float squares = 0;
  if constexpr (Vector) {
    for (int i = thread * 4; i < n; i += threads * 4) {
      const float4 v = *reinterpret_cast<const float4*>(row.x + i);
      squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
  } else {
    for (int i = thread; i < n; i += threads) squares += row.x[i] * row.x[i];
  }
  const float scale = 1.0f / sqrtf(sum(squares) / static_cast<float>(n) + args.eps);
  if constexpr (Vector) {
    for (int i = thread * 4; i < n; i += threads * 4) {
      float4 v = *reinterpret_cast<const float4*>(row.x + i);
      const float4 w =
          row.weight == nullptr ? make_float4(1, 1, 1, 1) : *reinterpret_cast<const float4*>(row.weight + i);
      v = make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w);
      if (row.residual != nullptr) {
        const float4 r = *reinterpret_cast<const float4*>(row.residual + i);
        v = make_float4(v.x + r.x, v.y + r.y, v.z + r.z, v.w + r.w);
      }
      const float s = args.scale;
      *reinterpret_cast<float4*>(row.out + i) = make_float4(v.x * s, v.y * s, v.z * s, v.w * s);
    }
  } else {
    for (int i = thread; i < n; i += threads) {
      float v = row.x[i] * scale;
      if (row.weight != nullptr) v *= row.weight[i];
      row.out[i] = (row.residual == nullptr ? v : v + row.residual[i]) * args.scale;
    }
  }
}

constexpr int kWarpsPerBlock = 8;

template <bool Vector>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    norm_warps(NormArgs args, int n, int rows_per_token, int64_t rows) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32;
  if (row >= rows) return;
  normalise<Vector>(args, row_of(args, n, rows_per_token, row), n, threadIdx.x % 32, 32,
                    [](float v) { return device::warp_sum(v); });
}

template <bool Vector>
__global__ void __launch_bounds__(1024) norm_blocks(NormArgs args, int n, int rows_per_token) {
  device::let_next_start();
  device::wait_for_previous();
  __shared__ float shared[32];
  normalise<Vector>(args, row_of(args, n, rows_per_token, blockIdx.x), n, threadIdx.x, blockDim.x,
                    [&](float v) { return device::block_sum(v, shared); });
}

// Layer norm: first the mean, then the variance, because a difference of sums of squares would lose digits. Both
// functions add a value over the threads of a row.
template <typename Sum, typename SumOfSquares>
__device__ __forceinline__ void centre(const NormArgs& args, const Row& row, int n, int thread, int threads,
                                       const Sum& sum, const SumOfSquares& sum_of_squares) {
  float total = 0;
  for (int i = thread; i < n; i += threads) total += row.x[i];
  const float mean = sum(total) / static_cast<float>(n);
  float squares = 0;
  for (int i = thread; i < n; i += threads) squares += (row.x[i] - mean) * (row.x[i] - mean);
  const float scale = 1.0f / sqrtf(sum_of_squares(squares) / static_cast<float>(n) + args.eps);
  for (int i = thread; i < n; i += threads) {
    float v = (row.x[i] - mean) * scale;
    if (row.weight != nullptr) v *= row.weight[i];
    if (args.bias != nullptr) v += args.bias[i];
    row.out[i] = (row.residual == nullptr ? v : v + row.residual[i]) * args.scale;
  }
}

__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    layer_norm_warps(NormArgs args, int n, int rows_per_token, int64_t rows) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t row = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / 32;
  if (row >= rows) return;
  const auto sum = [](float v) { return device::warp_sum(v); };
  centre(args, row_of(args, n, rows_per_token, row), n, threadIdx.x % 32, 32, sum, sum);
}

__global__ void __launch_bounds__(1024) layer_norm_blocks(NormArgs args, int n, int rows_per_token) {
  device::let_next_start();
  device::wait_for_previous();
  __shared__ float sums[32], squares[32];
  centre(
      args, row_of(args, n, rows_per_token, blockIdx.x), n, threadIdx.x, blockDim.x,
      [&](float v) { return device::block_sum(v, sums); }, [&](float v) { return device::block_sum(v, squares); });
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

void norm_rows_cuda(const NormArgs& args, const NormDesc& desc, int threads, CudaStream& stream) {
  const int64_t rows = desc.m * desc.rows_per_token;
  const int n = static_cast<int>(desc.n), per_token = static_cast<int>(desc.rows_per_token);
  const bool vector = n % 4 == 0 && args.weight_stride % 4 == 0 && args.x_stride % 4 == 0 && args.out_stride % 4 == 0 &&
                      aligned(args.x) && aligned(args.weight) && aligned(args.residual) && aligned(args.out);
  if (threads == 32) {
    const auto kernel = desc.centred ? layer_norm_warps : vector ? norm_warps<true> : norm_warps<false>;
    const auto blocks = static_cast<unsigned>((rows + kWarpsPerBlock - 1) / kWarpsPerBlock);
    launch_dependent("norm", kernel, blocks, 32 * kWarpsPerBlock, 0, stream.handle, args, n, per_token, rows);
  } else {
    const auto kernel = desc.centred ? layer_norm_blocks : vector ? norm_blocks<true> : norm_blocks<false>;
    launch_dependent("norm", kernel, static_cast<unsigned>(rows), static_cast<unsigned>(threads), 0, stream.handle,
                     args, n, per_token);
  }
}

}  // namespace dyno::ops
