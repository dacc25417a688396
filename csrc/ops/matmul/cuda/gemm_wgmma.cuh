// Tensor cores with wgmma (Hopper, code for 90a): weights are operand A in registers, tokens are operand B in shared
// memory. See gemm_tile.cuh for the division of work. Four consecutive warps form a warpgroup; each product uses stripe
// i of its four warps as the 64 rows of A.
#pragma once

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/wgmma.cuh"
#include "ops/matmul/cuda/gemm_mma.cuh"

namespace dyno::ops::cuda {

// Prefetch distance of weights into L2, in tiles. With 6 or 2 tiles, products of experts take up to 1.1 times as long.
inline constexpr int kWgmmaPrefetch = 3;

#ifdef DYNO_DEVICE_WGMMA

// A tile of kTokens rows, of which only the first kUsed may exist: fewer columns take less time.
template <DType kType, int kTokens, int kWarps, int kUsed>
__device__ __forceinline__ void wgmma_tile(const Problem& p, const GemmBlock& block, const WarpStripes<kType>& stripes,
                                           TokenCopies<kTokens, 32 * kWarps>& copies,
                                           typename WeightTile<kType>::Cursor (&cursor)[2], WeightTile<kType> (&now)[2],
                                           uint8_t* shared) {
  const uint32_t stages = device::shared_address(shared);
  const int lane = threadIdx.x & 31;
  // Tiles of the weights, and of the rows of x, which may contain k twice.
  const int weight_tiles = (p.k + kGpuTile - 1) / kGpuTile,
            tiles = half_passes(kType) == 2 ? p.passes * weight_tiles : weight_tiles;
#pragma unroll
  for (int s = 0; s < kStages - 2; ++s) {
    if (s < tiles) copies.template issue<kUsed>(stages + s * kTokens * kTileRowBytes);
    device::copy_async_commit();
  }

  WeightTile<kType> next[2];
  float sums[2][kUsed / 2] = {};
  uint32_t a[2][2][4];  // [step & 1][stripe]: running products read one while the other is written
  for (int tile = 0; tile < tiles; ++tile) {
    device::copy_async_wait<kStages - 3>();
    device::fence_async_shared();
    // The tile has arrived for all threads. Products of the previous tile may still run in other warps; products of the
    // tile before it are complete, and its stage is filled next.
    __syncthreads();
    const uint64_t stage = device::wgmma_descriptor(stages + tile % kStages * kTokens * kTileRowBytes);
    for_each_step([&]<int kStep>() {
      // At most the products of one step are running, so a[kStep & 1] is no longer read.
      now[0].template fragment<kStep>(a[kStep & 1][0]);
      now[1].template fragment<kStep>(a[kStep & 1][1]);
      device::wgmma_fence();
      device::wgmma_f16(sums[0], a[kStep & 1][0], stage + 2 * kStep);
      device::wgmma_f16(sums[1], a[kStep & 1][1], stage + 2 * kStep);
      device::wgmma_commit();
      // Issues loads for later tiles while these products run.
      if constexpr (kStep == 0) {
        if (tile + 1 < tiles) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (half_passes(kType) > 1 && tile + 1 == weight_tiles) {
              cursor[i] = typename WeightTile<kType>::Cursor(stripes.at[i], 0, lane);
            } else {
              cursor[i].advance();
            }
            next[i].load(cursor[i]);
          }
        }
      } else if constexpr (kStep == 1) {
        const int ahead = tile + kStages - 2;
        if (ahead < tiles) copies.template issue<kUsed>(stages + ahead % kStages * kTokens * kTileRowBytes);
        device::copy_async_commit();
      } else if constexpr (kStep == 2) {
        if (tile + kWgmmaPrefetch < weight_tiles) {
#pragma unroll
          for (int i = 0; i < 2; ++i) cursor[i].prefetch(kWgmmaPrefetch - 1, lane);
        }
      }
      device::wgmma_wait<1>();
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) now[i] = next[i];
  }
  device::wgmma_wait<0>();
  gemm_epilogue<kTokens, kWarps, kUsed>(p, block, sums, shared);
}

#endif  // DYNO_DEVICE_WGMMA

template <DType kType, int kTokens, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kGemmBlocks<kType, kTokens, kWarps>) gemm_wgmma_kernel(const Problem p) {
#ifdef DYNO_DEVICE_WGMMA
  if (p.grouping != Grouping::dense) {  // dense products were slower with early launches
    device::let_next_start();
    device::wait_for_previous();
  }
  const GemmBlock block = gemm_block<kTokens>(p);
  if (block.rows <= 0) return;
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const WarpStripes<kType> stripes(p, block.matrix, warp, kWarps);
  using Tile = WeightTile<kType>;
  typename Tile::Cursor cursor[2] = {{stripes.at[0], 0, lane}, {stripes.at[1], 0, lane}};
  Tile now[2];
  const int weight_tiles = (p.k + kGpuTile - 1) / kGpuTile;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    now[i].load(cursor[i]);
#pragma unroll
    for (int ahead = 1; ahead < kWgmmaPrefetch; ++ahead) {
      if (ahead < weight_tiles) cursor[i].prefetch(ahead, lane);
    }
  }
  // After the first weights, because these loads depend on each other.
  TokenCopies<kTokens, 32 * kWarps> copies(p, block);
  write_targets(p, block, reinterpret_cast<RowTarget*>(shared + gemm_targets_at(kTokens, kWarps)));

  // The default of experts, many of which have few rows.
  if constexpr (kTokens == 64 && kWarps == 8) {
    if (block.rows <= 16) return wgmma_tile<kType, kTokens, kWarps, 16>(p, block, stripes, copies, cursor, now, shared);
    if (block.rows <= 32) return wgmma_tile<kType, kTokens, kWarps, 32>(p, block, stripes, copies, cursor, now, shared);
    if (block.rows <= 48) return wgmma_tile<kType, kTokens, kWarps, 48>(p, block, stripes, copies, cursor, now, shared);
  }
  wgmma_tile<kType, kTokens, kWarps, kTokens>(p, block, stripes, copies, cursor, now, shared);
#endif
}

template <DType kType, int kTokens, int kWarps>
void gemm_wgmma_block(const Problem& p, CUstream_st* stream) {
  if constexpr (!instance_compiled("wgmma", kType, {kTokens, kWarps})) {
    throw_left_out("wgmma", kType, {kTokens, kWarps});
  } else {
    constexpr int kBytes = gemm_shared_bytes(kTokens, kWarps);
    const auto kernel = gemm_wgmma_kernel<kType, kTokens, kWarps>;
    allow_shared(kernel, kBytes);
    const dim3 grid = gemm_grid(p, kTokens, kWarps);
    if (p.grouping == Grouping::dense) {
      kernel<<<grid, 32 * kWarps, kBytes, stream>>>(p);
    } else {
      launch_dependent("matmul_id", kernel, grid, 32 * kWarps, kBytes, stream, p);
    }
  }
}

template <DType kType>
void gemm_wgmma(const Problem& p, int tokens, int warps, CUstream_st* stream) {
  const auto with_warps = [&]<int kWarps>() {
    switch (tokens) {
      case 16:
        return gemm_wgmma_block<kType, 16, kWarps>(p, stream);
      case 32:
        return gemm_wgmma_block<kType, 32, kWarps>(p, stream);
      case 64:
        return gemm_wgmma_block<kType, 64, kWarps>(p, stream);
      default:
        return gemm_wgmma_block<kType, 128, kWarps>(p, stream);
    }
  };
  if (warps == 4) {
    with_warps.template operator()<4>();
  } else {
    with_warps.template operator()<8>();
  }
}

}  // namespace dyno::ops::cuda
