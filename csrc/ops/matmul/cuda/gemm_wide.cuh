// Dense products of many tokens (Hopper, code for 90a). Two warpgroups multiply, each 64 rows of w by 256 rows of x. A
// fragment of weights is unpacked once for 256 tokens, half as often as in gemm_wgmma.cuh. A thread of a third
// warpgroup fills stages of x. The two blocks of a cluster share the rows of x: each copies one half of a stage to
// both. Clusters process many tiles, and x of the next tile arrives while the sums of the last one are stored.
//
// Several clusters can share the k of a tile (wide_parts.cuh), if there are too few tiles to fill the chip.
//
// For a gated pair, one warpgroup multiplies by the gate and the other by up, for the same rows. They exchange halves
// of their sums through shared memory, and each stores half of the tokens.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "core/cuda/launch_cluster.h"
#include "device/cluster.cuh"
#include "device/dependent.cuh"
#include "ops/matmul/cuda/row_part.cuh"
#include "ops/matmul/cuda/wide.h"
#include "ops/matmul/cuda/wide_epilogue.cuh"
#include "ops/matmul/cuda/wide_loop.cuh"
#include "ops/matmul/cuda/wide_parts.cuh"

namespace dyno::ops::cuda {

inline constexpr int kWideShared = kWideStages * (kWideStageBytes + 16) + kWideExchangeBytes + 1024;

struct WideTile {
  int matrix, first_token, row_tile;
  int number, part;  // index among all tiles, and part of k
};

// Tiles are numbered with tokens running fastest, in groups of `group` tiles of tokens. Clusters that run at the same
// time share both weights and rows of x; the group determines of which they read more. `count` is the number of tiles
// times parts of k; the parts of a tile follow each other.
struct WideTiles {
  int token_tiles, row_tiles, count, group, parts;

  __device__ __forceinline__ WideTiles(const Problem& p, int group_tiles, int parts)
      : token_tiles((p.rows + kWideTokens - 1) / kWideTokens),
        row_tiles(cuda::row_tiles(p, wide_rows(p))),
        count(token_tiles * row_tiles * p.matrices * parts),
        group(group_tiles),
        parts(parts) {}
  __device__ __forceinline__ WideTile tile(int index) const {
    const int number = index / parts, part = index % parts;
    const int each = token_tiles * row_tiles, matrix = number / each;
    index = number - matrix * each;
    const int first = index / (group * row_tiles) * group, width = min(group, token_tiles - first);
    index -= first * row_tiles;
    return {matrix, (first + index % width) * kWideTokens, index / width, number, part};
  }
};

#ifdef DYNO_DEVICE_WGMMA

// Called by one thread: copies this block's half of every stage of every tile to both blocks.
__device__ __forceinline__ void wide_fill(const Problem& p, const TiledRows& format, const WideStages& stages,
                                          const WideTiles& work, uint32_t rank) {
  constexpr uint32_t kHalf = kWideStageBytes / 2;
  const int tiles = static_cast<int>(format.k_tiles());
  uint32_t number = 0;
  for (int index = blockIdx.x; index < work.count; index += gridDim.x) {
    const WideTile tile = work.tile(index);
    const WideRange range(tiles, tile.part, work.parts);
    const int64_t tile_row = tile.matrix * format.token_tiles() + tile.first_token / kWideTokens;
    const uint8_t* from = p.x + (tile_row * tiles + range.begin) * kWideTileBytes + rank * kHalf;
    for (int at = range.begin; at < range.end; ++at, ++number, from += kWideTileBytes) {
      // Both blocks have finished reading the stage.
      device::wait_at(stages.empty(number), stages.parity(number) ^ 1);
      device::barrier_arrive_expecting(stages.full(number), kWideStageBytes);
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

template <DType kType, bool kShared>
__device__ __forceinline__ void wide_multiply(const Problem& p, const TiledRows& format, const WideStages& stages,
                                              const WideTiles& work, uint32_t rank, float4* exchange,
                                              const WideMeeting& meeting) {
  const int warp = threadIdx.x >> 5 & 3, group = threadIdx.x / 128;
  const int weight_tiles = static_cast<int>(format.weight_tiles()),
            tiles = half_passes(kType) == 2 ? static_cast<int>(format.k_tiles()) : weight_tiles;
  // Constants if k is not shared.
  const auto range_of = [&](const WideTile& tile) {
    return kShared ? WideRange(tiles, tile.part, work.parts) : WideRange(tiles, 0, 1);
  };
  int index = blockIdx.x;
  if (index >= work.count) return;
  WideTile tile = work.tile(index);
  WideStripe stripe = WideStripe::of<kType>(p, tile, rank, group, warp);
  WideWeights<kType, 1> weights(stripe.at, range_of(tile).first_weights(weight_tiles));
  device::wait_for_previous();  // weights do not depend on earlier launches
  uint32_t number = 0;
  while (true) {
    const bool last = index + static_cast<int>(gridDim.x) >= work.count;
    const WideTile tile_after = last ? tile : work.tile(index + gridDim.x);
    const WideStripe after = WideStripe::of<kType>(p, tile_after, rank, group, warp);
    const WideRange range = range_of(tile);
    float sums[kWideTokens / 2] = {};
    const WideRun run{range,        stripe.at, after.at, range_of(tile_after).first_weights(weight_tiles),
                      weight_tiles, tiles};
    wide_sums(stages, run, number, weights, sums);
    const RowPart part = row_part(p, tile.row_tile, wide_rows(p));
    const WideTarget target(p, part, format, tile.matrix, tile.first_token, stripe.row);
    if constexpr (!kShared) {
      wide_epilogue(p, part, target, group, sums, exchange);
    } else {
      const int number_of_warp = tile.number * kWideWarps + static_cast<int>(rank) * 8 + group * 4 + warp;
      wide_shared_epilogue(p, part, target, meeting, number_of_warp, tile.part, sums);
    }
    if (last) return;
    index += gridDim.x;
    tile = tile_after;
    stripe = after;
  }
}
#endif  // DYNO_DEVICE_WGMMA

template <DType kType, bool kShared>
__global__ void __launch_bounds__(384, 1)
    gemm_wide_kernel(const Problem p, const TiledRows format, int group, const WideMeeting meeting) {
#ifdef DYNO_DEVICE_WGMMA
  device::let_next_start();
  constexpr uint32_t kStagesBytes = kWideStages * kWideStageBytes;
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  float4* exchange = reinterpret_cast<float4*>(shared + kStagesBytes);
  const uint32_t base = device::shared_address(shared);
  const WideStages stages{base, base + kStagesBytes + kWideExchangeBytes};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kWideStages; ++i) {
      device::barrier_init(stages.full(i), 1);
      device::barrier_init(stages.empty(i), 16);  // the multiplying warps of both blocks
    }
    device::barrier_init_fence();
  }
  device::cluster_sync();  // barriers are initialised in both blocks
  const uint32_t rank = device::cluster_rank();
  const WideTiles work(p, group, kShared ? meeting.parts : 1);
  if (threadIdx.x >= 256) {
    device::give_registers<40>();
    device::wait_for_previous();
    if (threadIdx.x == 256) wide_fill(p, format, stages, work, rank);
    __syncwarp();  // the warp must be converged for the cluster barrier
  } else {
    device::take_registers<232>();
    wide_multiply<kType, kShared>(p, format, stages, work, rank, exchange, meeting);
  }
  device::cluster_sync();  // no copy or arrival to the other block is pending
#endif
}

template <DType kType, bool kShared>
void gemm_wide_launch(const Problem& p, const TiledRows& format, int group, int multiprocessors, CUstream_st* stream) {
  const auto kernel = gemm_wide_kernel<kType, kShared>;
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWideShared));
  const int64_t tiles =
      p.matrices * ((format.rows + kWideTokens - 1) / kWideTokens) * row_tiles(p, wide_rows(p)) * format.parts;
  const int64_t clusters = multiprocessors < 2 ? 1 : multiprocessors / 2;
  WideMeeting meeting;
  if constexpr (kShared) {
    auto* x = const_cast<uint8_t*>(p.x);  // the workspace, which continues behind the rows
    meeting = {format.parts, reinterpret_cast<int32_t*>(x + format.arrivals_at()),
               reinterpret_cast<float4*>(x + format.sums_at())};
  }
  const dim3 grid(static_cast<unsigned>(tiles < clusters ? tiles : clusters), 2);
  launch_dependent_cluster("matmul", kernel, grid, 384, Cluster(1, false, 2), kWideShared, stream, p, format, group,
                           meeting);
}

template <DType kType>
void gemm_wide_of(const Problem& p, const TiledRows& format, int group, int multiprocessors, CUstream_st* stream) {
  const auto launch = format.parts > 1 ? gemm_wide_launch<kType, true> : gemm_wide_launch<kType, false>;
  launch(p, format, group, multiprocessors, stream);
}

}  // namespace dyno::ops::cuda
