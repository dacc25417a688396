// Experts with weights that path `dequantize` has unpacked (Hopper, code for 90a). One warpgroup fills stages of 64 k
// in shared memory, and two multiply them. The threads of the filling warpgroup gather rows of x; weights are bulk
// copies. Blocks process many tiles, and the next tile is filled while the sums of the last one are stored. See
// staged_tiles.cuh for the division of work.
//
// Rows of x outside a tile are not multiplied: a tile uses the narrowest product of 16 to 128 columns that covers its
// rows, so experts with few rows cost little.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "ops/matmul/cuda/gemm_mma.cuh"
#include "ops/matmul/cuda/staged_tiles.cuh"

namespace dyno::ops::cuda {

#ifdef DYNO_DEVICE_WGMMA

inline constexpr int kFillWarps = 4;

// ---- Rows of x -----------------------------------------------------------------------------------------------------

// A filling thread's share of the copies of x: chunk `thread % 8` of rows thread / 8 + 16·i, the same for the whole
// tile.
struct StagedTokens {
  static constexpr int kCount = kStagedTokens / 16;
  const uint8_t* from[kCount];
  uint32_t valid = 0;
  uint32_t to;
  int count;

  __device__ __forceinline__ StagedTokens(const Problem& p, const GemmBlock& block, int thread, int columns) {
    const int row0 = thread / 8, chunk = thread % 8;
    to = row0 * kTileRowBytes + ((chunk ^ (row0 & 7)) << 4);
    count = columns / 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = row0 + i * 16;
      if (row < block.rows) valid |= 1u << i;
      from[i] = x_row(p, block, min(row, block.rows - 1)) + chunk * 16;
    }
  }
  __device__ __forceinline__ void issue(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) device::copy_async_16(stage + to + i * 16 * kTileRowBytes, from[i], valid >> i & 1);
      from[i] += kTileRowBytes;
    }
  }
};

// ---- Weights -------------------------------------------------------------------------------------------------------

// Tiles that path `dequantize` has unpacked (Unpacked::tiles_*), bulk-copied by one thread.
template <int kBlocks>
struct UnpackedWeights {
  static constexpr int kCount = 2 * kBlocks;
  const uint8_t* from;
  int64_t block_bytes;
  int last, weight_tiles;  // last: this tile's blocks that exist in the matrix
  bool copies;

  __device__ __forceinline__ UnpackedWeights(const Problem& p, const StagedTile& tile, int warp, int lane)
      : copies(warp == 0 && lane == 0) {
    const int rows = p.gated() ? 32 : 64, blocks = (p.n + rows - 1) / rows, first = tile.row_tile * kCount;
    weight_tiles = (p.k + kGpuTile - 1) / kGpuTile;
    block_bytes = static_cast<int64_t>(weight_tiles) * kStagedBlockBytes;
    from = p.w + tile.tokens.matrix * p.w_stride + first * block_bytes;
    last = min(kCount, blocks - first) - 1;
  }
  __device__ __forceinline__ void announce(uint32_t stage, uint32_t full, int at) const {
    if (!copies) return;
    device::barrier_expect_bytes(full, kCount * kStagedBlockBytes);
    const uint8_t* tile = from + static_cast<int64_t>(at >= weight_tiles ? at - weight_tiles : at) * kStagedBlockBytes;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      device::copy_bulk(stage + i * kStagedBlockBytes, tile + min(i, last) * block_bytes, kStagedBlockBytes, full);
    }
  }
};

// ---- The kernel ----------------------------------------------------------------------------------------------------

// Stages and their barriers. `number` counts tiles of k over all tiles of a block.
struct StagedStages {
  uint32_t base, barriers, stage_bytes;
  __device__ __forceinline__ uint32_t weights(uint32_t number) const {
    return base + number % kStagedStages * stage_bytes;
  }
  __device__ __forceinline__ uint32_t full(uint32_t number) const { return barriers + number % kStagedStages * 16; }
  __device__ __forceinline__ uint32_t empty(uint32_t number) const { return full(number) + 8; }
  // The address of the info for turn `turn`.
  __device__ __forceinline__ uint32_t info(uint32_t turn) const {
    return barriers + kStagedStages * 16 + turn % kStagedInfos * 8;
  }
  static __device__ __forceinline__ uint32_t parity(uint32_t number) { return number / kStagedStages & 1; }
};

__device__ __forceinline__ int staged_columns(int rows) {
  return rows <= 16 ? 16 : rows <= 32 ? 32 : rows <= 64 ? 64 : rows <= 96 ? 96 : 128;
}

// Multiplies one stage: kN rows of x, for which sums[b] gets its first kN / 2 elements.
template <int kN, int kBlocks, bool kBf16>
__device__ __forceinline__ void staged_step(float (&sums)[kBlocks][kStagedTokens / 2], uint32_t w, uint32_t x,
                                            bool add) {
  const uint64_t x_at = device::wgmma_descriptor(x);
  device::wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint64_t w_at = device::wgmma_descriptor(w + b * kStagedBlockBytes);
      device::wgmma_shared<kBf16>(*reinterpret_cast<float(*)[kN / 2]>(sums[b]), w_at + 2 * step, x_at + 2 * step,
                                  add || step > 0);
    }
  }
}

// Multiplies one tile by the rows of w of this warpgroup over all of k, and stores y. release(number): this warp no
// longer reads the stage.
template <int kBlocks, bool kBf16, typename Release>
__device__ __forceinline__ void staged_multiply(const Problem& p, const StagedInfo& info, const StagedStages& stages,
                                                uint32_t number, int tiles, int group, const Release& release) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  const int columns = staged_columns(info.tile.tokens.rows);
  float sums[kBlocks][kStagedTokens / 2];
  for (int at = 0; at < tiles; ++at, ++number) {
    device::wait_at(stages.full(number), StagedStages::parity(number));
    const uint32_t w = stages.weights(number) + group * kBlocks * kStagedBlockBytes;
    const uint32_t x = stages.weights(number) + 2 * kBlocks * kStagedBlockBytes;
    switch (columns) {
      case 16:
        staged_step<16, kBlocks, kBf16>(sums, w, x, at > 0);
        break;
      case 32:
        staged_step<32, kBlocks, kBf16>(sums, w, x, at > 0);
        break;
      case 64:
        staged_step<64, kBlocks, kBf16>(sums, w, x, at > 0);
        break;
      case 96:
        staged_step<96, kBlocks, kBf16>(sums, w, x, at > 0);
        break;
      default:
        staged_step<128, kBlocks, kBf16>(sums, w, x, at > 0);
    }
    device::wgmma_commit();
    if (at > 0) {
      device::wgmma_wait<1>();  // the products of the previous stage are complete
      release(number - 1);
    }
  }
  device::wgmma_wait<0>();
  release(number - 1);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int block = info.tile.row_tile * 2 * kBlocks + group * kBlocks + b;
    staged_epilogue(p, info.tile.tokens, p.gated() ? 32 * block + 8 * warp : 64 * block + 16 * warp, lane, sums[b],
                    info.targets);
  }
}
#endif  // DYNO_DEVICE_WGMMA

template <bool kBf16, int kBlocks>
__global__ void __launch_bounds__(384, 1) gemm_staged_kernel(const Problem p) {
#ifdef DYNO_DEVICE_WGMMA
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const StagedStages stages{device::shared_address(shared),
                            device::shared_address(shared) + kStagedStages * kStagedStageBytes<kBlocks>,
                            kStagedStageBytes<kBlocks>};
  const int group = threadIdx.x / 128, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStagedStages; ++i) {
      device::barrier_init(stages.full(i), kFillWarps);
      device::barrier_init(stages.empty(i), 8);
    }
    for (int i = 0; i < kStagedInfos; ++i) device::barrier_init(stages.info(i), 32 * kFillWarps);
    device::barrier_init_fence();
  }
  __syncthreads();  // barriers are initialised

  const int rows_of_w = 128 * kBlocks / (p.gated() ? 2 : 1);
  const StagedTiles work(p, rows_of_w);
  const int weight_tiles = (p.k + kGpuTile - 1) / kGpuTile, tiles = p.passes * weight_tiles;
  auto* infos =
      reinterpret_cast<StagedInfo*>(shared + kStagedStages * kStagedStageBytes<kBlocks> + kStagedBarrierBytes);
  uint32_t number = 0, turn = 0;
  if (group == 2) {
    device::give_registers<136>();
    constexpr int kAhead = 2;  // stages whose rows of x are being copied
    for (int index = blockIdx.x; index < work.count; index += gridDim.x, ++turn) {
      const StagedTile tile = work.tile(p, index);
      const int thread = threadIdx.x & 127;
      const RowTarget target = staged_target(p, tile.tokens, thread);
      StagedTokens tokens(p, tile.tokens, thread, staged_columns(tile.tokens.rows));
      const UnpackedWeights<kBlocks> weights(p, tile, warp, lane);
      const auto announce = [&](int at) {
        const uint32_t next = number + at;
        if (at < tiles) {
          device::wait_at(stages.empty(next), StagedStages::parity(next) ^ 1);
          tokens.issue(stages.weights(next) + 2 * kBlocks * kStagedBlockBytes);
          weights.announce(stages.weights(next), stages.full(next), at);
        }
        device::copy_async_commit();
      };
      for (int at = 0; at < kAhead; ++at) announce(at);
      StagedInfo& info = infos[turn % kStagedInfos];
      info.targets[thread] = target;
      if (thread == 0) info.tile = tile;
      device::arrive_at(stages.info(turn));
      for (int at = 0; at < tiles; ++at) {
        announce(at + kAhead);
        device::copy_async_wait<kAhead>();
        device::fence_async_shared();
        __syncwarp();  // the warp's part of the stage has arrived
        if (lane == 0) device::arrive_at(stages.full(number + at));
      }
      number += tiles;
    }
  } else {
    device::take_registers<184>();
    for (int index = blockIdx.x; index < work.count; index += gridDim.x, ++turn) {
      device::wait_at(stages.info(turn), turn / kStagedInfos & 1);
      const StagedInfo& info = infos[turn % kStagedInfos];
      staged_multiply<kBlocks, kBf16>(p, info, stages, number, tiles, group, [&](uint32_t done) {
        if (lane == 0) device::arrive_at(stages.empty(done));
      });
      number += tiles;
    }
  }
#endif
}

template <bool kBf16, int kBlocks>
void gemm_staged_launch(const Problem& p, int multiprocessors, CUstream_st* stream) {
  constexpr int kBytes = kStagedShared<kBlocks>;
  const auto kernel = gemm_staged_kernel<kBf16, kBlocks>;
  allow_shared(kernel, kBytes);
  const dim3 tiles = gemm_grid(p, kStagedTokens, 4 * kBlocks);
  const int64_t count = static_cast<int64_t>(tiles.x) * tiles.y * tiles.z;
  const auto blocks = static_cast<unsigned>(count < multiprocessors ? count : multiprocessors);
  kernel<<<blocks, 384, kBytes, stream>>>(p);
}

}  // namespace dyno::ops::cuda
