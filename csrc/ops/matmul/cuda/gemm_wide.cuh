// Dense products of many tokens (Hopper, code for 90a). Two warpgroups multiply, each 64 rows of w by 256 or 128 rows
// of x. A fragment of weights is unpacked once for 256 tokens, half as often as in gemm_wgmma.cuh. A thread of a third
// warpgroup fills stages of x. The two blocks of a cluster share the rows of x: each copies one half of a stage to
// both. Clusters process many tiles, and x of the next tile arrives while the sums of the last one are stored.
//
// For a gated pair, one warpgroup multiplies by the gate and the other by up, for the same rows. They exchange halves
// of their sums through shared memory, and each stores half of the tokens.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "device/cluster.cuh"
#include "device/wgmma_wide.cuh"
#include "ops/matmul/cuda/row_part.cuh"
#include "ops/matmul/cuda/wide.h"
#include "ops/matmul/cuda/wide_epilogue.cuh"

namespace dyno::ops::cuda {

template <int kTokens>
inline constexpr uint32_t kWideStageBytes = kTokens * 128;
template <int kTokens>
inline constexpr uint32_t kWideStages = 4 * kWideTokens / kTokens;
template <int kTokens>
inline constexpr int kWideShared =
    kWideStages<kTokens> * (kWideStageBytes<kTokens> + 16) + kWideExchangeBytes<kTokens> + 1024;
inline constexpr int kWidePrefetch = 6;  // prefetch distance of weights into L2, in tiles

struct WideTile {
  int matrix, first_token, row_tile;
};

// Tiles are numbered with tokens running fastest, in groups of `group` tiles of tokens. Clusters that run at the same
// time share both weights and rows of x; the group determines of which they read more.
template <int kTokens>
struct WideTiles {
  int token_tiles, row_tiles, count, group;

  __device__ __forceinline__ WideTiles(const Problem& p, int group_tiles)
      : token_tiles((p.rows + kTokens - 1) / kTokens),
        row_tiles(cuda::row_tiles(p, wide_rows(p))),
        count(token_tiles * row_tiles * p.matrices),
        group(group_tiles) {}
  __device__ __forceinline__ WideTile tile(int index) const {
    const int each = token_tiles * row_tiles, matrix = index / each;
    index -= matrix * each;
    const int first = index / (group * row_tiles) * group, width = min(group, token_tiles - first);
    index -= first * row_tiles;
    return {matrix, (first + index % width) * kTokens, index / width};
  }
};

#ifdef DYNO_DEVICE_WGMMA

template <int kTokens>
struct WideStages {
  static constexpr uint32_t kCount = kWideStages<kTokens>;
  uint32_t base, barriers;
  __device__ __forceinline__ uint32_t at(uint32_t number) const {
    return base + number % kCount * kWideStageBytes<kTokens>;
  }
  __device__ __forceinline__ uint32_t full(uint32_t number) const { return barriers + number % kCount * 16; }
  __device__ __forceinline__ uint32_t empty(uint32_t number) const { return full(number) + 8; }
  static __device__ __forceinline__ uint32_t parity(uint32_t number) { return number / kCount & 1; }
};

// Called by one thread: copies this block's half of every stage of every tile to both blocks.
template <int kTokens>
__device__ __forceinline__ void wide_fill(const Problem& p, const TiledRows& format, const WideStages<kTokens>& stages,
                                          const WideTiles<kTokens>& work, uint32_t rank) {
  constexpr uint32_t kHalf = kWideStageBytes<kTokens> / 2;
  const int tiles = static_cast<int>(format.k_tiles());
  uint32_t number = 0;
  for (int index = blockIdx.x / 2; index < work.count; index += gridDim.x / 2) {
    const WideTile tile = work.tile(index);
    const int64_t tile_row = tile.matrix * format.token_tiles() + tile.first_token / kWideTokens;
    const uint8_t* from = p.x + tile_row * tiles * kWideTileBytes + tile.first_token % kWideTokens * 128 + rank * kHalf;
    for (int at = 0; at < tiles; ++at, ++number, from += kWideTileBytes) {
      // Both blocks have finished reading the stage.
      device::wait_at(stages.empty(number), stages.parity(number) ^ 1);
      device::barrier_arrive_expecting(stages.full(number), kWideStageBytes<kTokens>);
      device::copy_bulk_to(3, stages.at(number) + rank * kHalf, from, kHalf, stages.full(number));
    }
  }
}

// The stripe of weights that a warp multiplies in a tile, and its first row.
struct WideStripe {
  const uint8_t* at;
  int row;

  template <DType kType>
  static __device__ __forceinline__ WideStripe of(const Problem& p, const WideTile& tile, uint32_t rank, int group,
                                                  int warp) {
    const RowPart part = row_part(p, tile.row_tile, wide_rows(p));
    const int stripes = (part.n + kGpuRows - 1) / kGpuRows;
    const int block = part.tile * 2 + static_cast<int>(rank);
    const int index = (p.gated() ? block * 4 : block * 8 + group * 4) + warp;
    const uint8_t* w = (p.gated() && group == 1 ? p.w_up : part.w) + tile.matrix * p.w_stride;
    // A stripe beyond n repeats the last one; its sums are not stored.
    return {w + min(index, stripes - 1) * gpu_stripe_bytes(kType, p.k), index * kGpuRows};
  }
};

template <DType kType, int kTokens>
__device__ __forceinline__ void wide_multiply(const Problem& p, const TiledRows& format,
                                              const WideStages<kTokens>& stages, const WideTiles<kTokens>& work,
                                              uint32_t rank, float4* exchange) {
  using Tile = WeightTile<kType>;
  constexpr GpuFormat kFormat = gpu_format(kType);
  constexpr int kTileStep = kFormat.unit_bytes() / (kFormat.unit_k() / kGpuTile);  // approximate bytes
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x / 128;
  const int weight_tiles = static_cast<int>(format.weight_tiles()),
            tiles = half_passes(kType) == 2 ? static_cast<int>(format.k_tiles()) : weight_tiles;
  int index = blockIdx.x / 2;
  if (index >= work.count) return;
  WideTile tile = work.tile(index);
  WideStripe stripe = WideStripe::of<kType>(p, tile, rank, group, warp);
  typename Tile::Cursor cursor(stripe.at, 0, lane);
  Tile now, next;
  now.load(cursor);
  uint32_t number = 0;
  while (true) {
    const bool last = index + static_cast<int>(gridDim.x / 2) >= work.count;
    const WideTile tile_after = last ? tile : work.tile(index + gridDim.x / 2);
    const WideStripe after = WideStripe::of<kType>(p, tile_after, rank, group, warp);
    float sums[kTokens / 2] = {};
    uint32_t a[2][4];  // [step & 1]: running products read one while the other is written
    for (int at = 0; at < tiles; ++at, ++number) {
      const uint64_t x = device::wgmma_descriptor(stages.at(number));
      for_each_step([&]<int kStep>() {
        // At most the products of one step are running, so a[kStep & 1] is no longer read.
        now.template fragment<kStep>(a[kStep & 1]);
        if constexpr (kStep == 0) device::wait_at(stages.full(number), stages.parity(number));
        device::wgmma_fence();
        device::wgmma_f16(sums, a[kStep & 1], x + 2 * kStep);
        device::wgmma_commit();
        if constexpr (kStep == 0) {
          if (at + 1 == tiles) {
            cursor = typename Tile::Cursor(after.at, 0, lane);  // arrives while the sums are stored
          } else if (half_passes(kType) > 1 && at + 1 == weight_tiles) {
            cursor = typename Tile::Cursor(stripe.at, 0, lane);
          } else {
            cursor.advance();
          }
          next.load(cursor);
        } else if constexpr (kStep == 2) {
          const int ahead = at + kWidePrefetch - (tiles - weight_tiles);
          if (lane < (kTileStep + 127) / 128 && ahead >= 0) {
            const uint8_t* from = ahead < weight_tiles ? stripe.at + int64_t{ahead} * kTileStep
                                                       : after.at + int64_t{ahead - weight_tiles} * kTileStep;
            device::prefetch_l2(from + lane * 128);
          }
        }
        device::wgmma_wait<1>();
        // Only products of this stage are running, so the previous stage is no longer read.
        if constexpr (kStep == 0) {
          if (at > 0 && lane < 2) device::barrier_arrive_at(stages.empty(number - 1), lane);
        }
      });
      now = next;
    }
    device::wgmma_wait<0>();
    if (lane < 2) device::barrier_arrive_at(stages.empty(number - 1), lane);
    wide_epilogue<kTokens>(p, row_part(p, tile.row_tile, wide_rows(p)), format, tile.matrix, tile.first_token,
                           stripe.row, group, sums, exchange);
    if (last) return;
    index += gridDim.x / 2;
    tile = tile_after;
    stripe = after;
  }
}
#endif  // DYNO_DEVICE_WGMMA

template <DType kType, int kTokens>
__global__ void __launch_bounds__(384, 1) gemm_wide_kernel(const Problem p, const TiledRows format, int group) {
#ifdef DYNO_DEVICE_WGMMA
  constexpr uint32_t kStagesBytes = kWideStages<kTokens> * kWideStageBytes<kTokens>;
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  float4* exchange = reinterpret_cast<float4*>(shared + kStagesBytes);
  const uint32_t base = device::shared_address(shared);
  const WideStages<kTokens> stages{base, base + kStagesBytes + kWideExchangeBytes<kTokens>};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < stages.kCount; ++i) {
      device::barrier_init(stages.full(i), 1);
      device::barrier_init(stages.empty(i), 16);  // the multiplying warps of both blocks
    }
    device::barrier_init_fence();
  }
  device::cluster_sync();  // barriers are initialised in both blocks
  const uint32_t rank = device::cluster_rank();
  const WideTiles<kTokens> work(p, group);
  if (threadIdx.x >= 256) {
    device::give_registers<40>();
    if (threadIdx.x == 256) wide_fill(p, format, stages, work, rank);
    __syncwarp();  // the warp must be converged for the cluster barrier
  } else {
    device::take_registers<232>();
    wide_multiply<kType>(p, format, stages, work, rank, exchange);
  }
  device::cluster_sync();  // no copy or arrival to the other block is pending
#endif
}

template <DType kType, int kTokens>
void gemm_wide_launch(const Problem& p, const TiledRows& format, int group, int multiprocessors, CUstream_st* stream) {
  const auto kernel = gemm_wide_kernel<kType, kTokens>;
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWideShared<kTokens>));
  const int64_t tiles = p.matrices * ((format.rows + kTokens - 1) / kTokens) * row_tiles(p, wide_rows(p));
  const int64_t clusters = multiprocessors < 2 ? 1 : multiprocessors / 2;
  cudaLaunchAttribute pair{};
  pair.id = cudaLaunchAttributeClusterDimension;
  pair.val.clusterDim.x = 2, pair.val.clusterDim.y = 1, pair.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(2 * (tiles < clusters ? tiles : clusters)));
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = kWideShared<kTokens>;
  config.stream = stream;
  config.attrs = &pair;
  config.numAttrs = 1;
  DYNO_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, p, format, group));
}

template <DType kType>
void gemm_wide_of(const Problem& p, const TiledRows& format, int tokens, int group, int multiprocessors,
                  CUstream_st* stream) {
  const auto launch = tokens == 128 ? gemm_wide_launch<kType, 128> : gemm_wide_launch<kType, kWideTokens>;
  launch(p, format, group, multiprocessors, stream);
}

}  // namespace dyno::ops::cuda
