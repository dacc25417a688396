// Writes the tiles of f16 rows that gemm_wide.cuh reads.
#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/cuda/stream_rows.cuh"
#include "ops/matmul/cuda/wide.h"
#include "ops/matmul/cuda/wide_chunk.cuh"

namespace dyno::ops::cuda {
namespace {

constexpr int kFewThreads = 256, kMostThreads = 512;  // per block
constexpr int kFewKept = 2, kMostKept = 4;  // chunks of 8 elements per thread, for rows of 4,096 and of 16,384

// Writes the sum of 32 f16 values (eight in each of four adjacent lanes) as f16 and its rest: operands of the tile's
// super-block `at`, for row r, block `block`.
__device__ __forceinline__ void put_sum(float sum, uint8_t* at, int r, int block) {
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  if (threadIdx.x % 4 != 0) return;
  const __half high = __float2half_rn(sum);
  auto* to = reinterpret_cast<__half*>(at + r / 8 * 256 + r % 8 * 16) + block;
  to[0] = high;
  to[64] = __float2half_rn(sum - __half2float(high));  // the other eight of the operand's k
}

// The sum of `squares` and the maximum of `most` over the block.
template <int kThreads>
__device__ __forceinline__ void reduce_both(float& squares, float& most, float2* shared) {
  squares = device::warp_sum(squares), most = device::warp_max(most);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) shared[threadIdx.x / 32] = make_float2(squares, most);
  __syncthreads();  // the results of all warps are written
  const float2 of_warp = lane < kThreads / 32 ? shared[lane] : make_float2(0, 0);
  squares = device::warp_sum(of_warp.x), most = device::warp_max(of_warp.y);
}

// One block per row; the scale is a power of two, so division by it is exact. kKept: chunks of 8 elements that a thread
// keeps between the search for the maximum and the scaling. If these are the whole row, the weights of a norm are
// loaded before the previous launch has ended. kArrivals: the first block sets the arrivals of shared tiles to zero.
template <bool kNorm, bool kArrivals, int kKept, int kThreads>
__global__ void __launch_bounds__(kThreads)
    tile_rows_kernel(const TiledRows format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, bool quads,
                     const RowNorm norm, uint8_t* out) {
  constexpr bool kWeights = kNorm && kKept == kFewKept;
  device::let_next_start();
  const int k = static_cast<int>(format.k), weight_tiles = static_cast<int>(format.weight_tiles());
  [[maybe_unused]] Chunk weights[kWeights ? kKept : 1];
  if constexpr (kWeights) {
    if (norm.weight != nullptr) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        weights[i] = Chunk(norm.weight, 8 * static_cast<int>(threadIdx.x + i * kThreads), k, quads);
      }
    }
  }
  device::wait_for_previous();
  if (kArrivals && blockIdx.x == 0 && blockIdx.y == 0) {
    auto* arrivals = reinterpret_cast<int32_t*>(out + format.arrivals_at());
    for (int i = threadIdx.x; i < format.shared_tiles * kWideArrivals; i += kThreads) arrivals[i] = 0;
  }
  __shared__ float2 shared[32];
  const float* row = reinterpret_cast<const float*>(x + blockIdx.y * x_batch_stride + blockIdx.x * x_stride);
  const unsigned height = static_cast<unsigned>(format.height);
  const int64_t tile_bytes = format.tile_bytes(), token_tile = blockIdx.y * format.token_tiles() + blockIdx.x / height;
  const int r = static_cast<int>(blockIdx.x % height), chunks = weight_tiles * 8;
  uint8_t* tiles = out + format.tile_at(token_tile * format.k_tiles()) + r * 128;
  uint8_t* rests = format.passes == 2 ? tiles + weight_tiles * tile_bytes : nullptr;

  Chunk kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i) kept[i] = Chunk(row, 8 * static_cast<int>(threadIdx.x + i * kThreads), k, quads);
  const auto weigh = [&](Chunk& chunk, int at) {
    if (norm.weight != nullptr) chunk.multiply(Chunk(norm.weight, at, k, quads));
  };
  float squares = 0, most = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if constexpr (kNorm) {
      squares += kept[i].squares();
      if constexpr (kWeights) {
        if (norm.weight != nullptr) kept[i].multiply(weights[i]);
      } else {
        weigh(kept[i], 8 * static_cast<int>(threadIdx.x + i * kThreads));
      }
    }
    most = kept[i].largest(most);
  }
  // For a row that is longer than the kept chunks.
  const auto again = [&](int c) {
    Chunk chunk(row, 8 * c, k, quads);
    if constexpr (kNorm) weigh(chunk, 8 * c);
    return chunk;
  };
  for (int c = threadIdx.x + kKept * kThreads; c < chunks; c += kThreads) {
    if constexpr (kNorm) squares += Chunk(row, 8 * c, k, quads).squares();
    most = again(c).largest(most);
  }
  reduce_both<kThreads>(squares, most, shared);
  const float factor = kNorm ? 1.0f / sqrtf(squares / static_cast<float>(k) + norm.eps) : 1.0f;
  // The f16 values are x·weight·factor / scale.
  const float scale = row_scale(most * factor), inverse = factor / scale;

  const auto put = [&](const Chunk& chunk, int c) {
    const int64_t at = format.tile_at(c / 8) + ((c % 8 ^ (r & 7)) << 4);
    const float sum = chunk.put(inverse, tiles + at, rests == nullptr ? nullptr : rests + at);
    // A warp has whole super-blocks, so all of its lanes are active here.
    if (format.sums) put_sum(sum, tiles - r * 128 + format.tile_at(c / 32 * 4) + 4 * tile_bytes, r, c / 4 % 8);
  };
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int c = threadIdx.x + i * kThreads;
    if (c < chunks) put(kept[i], c);
  }
  for (int c = threadIdx.x + kKept * kThreads; c < chunks; c += kThreads) put(again(c), c);
  if (threadIdx.x == 0) {
    reinterpret_cast<float*>(out + format.scales_at())[token_tile * format.height + r] = scale;
  }
}

}  // namespace

void tile_rows(const TiledRows& format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, uint8_t* out,
               CUstream_st* stream, const RowNorm& norm) {
  const dim3 grid(static_cast<unsigned>(format.rows), static_cast<unsigned>(format.batch));
  const bool quads = (reinterpret_cast<uintptr_t>(x) | static_cast<uintptr_t>(x_stride) |
                      static_cast<uintptr_t>(x_batch_stride) | reinterpret_cast<uintptr_t>(norm.weight)) %
                         16 ==
                     0;
  const bool few = format.weight_tiles() * 8 <= kFewKept * kFewThreads;
  const auto kernel_of = [&]<bool kNorm, bool kArrivals>() {
    return few ? tile_rows_kernel<kNorm, kArrivals, kFewKept, kFewThreads>
               : tile_rows_kernel<kNorm, kArrivals, kMostKept, kMostThreads>;
  };
  const bool shared = format.shared_tiles > 0;
  const auto kernel =
      norm.normed ? shared ? kernel_of.template operator()<true, true>() : kernel_of.template operator()<true, false>()
      : shared ? kernel_of.template operator()<false, true>()
                  : kernel_of.template operator()<false, false>();
  launch_dependent("matmul", kernel, grid, few ? kFewThreads : kMostThreads, 0, stream, format, x, x_stride,
                   x_batch_stride, quads, norm, out);
}

}  // namespace dyno::ops::cuda
