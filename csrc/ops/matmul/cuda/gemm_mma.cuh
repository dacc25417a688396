// Tensor cores with mma.sync, for every chip since Turing. See gemm_tile.cuh for the division of work.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "ops/instances.h"
#include "ops/matmul/cuda/gemm_tile.cuh"

namespace dyno::ops::cuda {

template <DType kType, int kTokens, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, kGemmBlocks<kType, kTokens, kWarps>) gemm_mma_kernel(const Problem p) {
  const GemmBlock block = gemm_block<kTokens>(p);
  if (block.rows <= 0) return;
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const uint32_t stages = device::shared_address(shared);

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const WarpStripes<kType> stripes(p, block.matrix, warp, kWarps);
  TokenCopies<kTokens, 32 * kWarps> copies(p, block);
  write_targets(p, block, reinterpret_cast<RowTarget*>(shared + gemm_targets_at(kTokens, kWarps)));
  // Tiles of the weights, and of the rows of x, which may contain k twice.
  const int weight_tiles = (p.k + kGpuTile - 1) / kGpuTile,
            tiles = half_passes(kType) == 2 ? p.passes * weight_tiles : weight_tiles;

  using Tile = WeightTile<kType>;
  typename Tile::Cursor cursor[2] = {{stripes.at[0], 0, lane}, {stripes.at[1], 0, lane}};
  Tile now[2], next[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) now[i].load(cursor[i]);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < tiles) copies.issue(stages + s * kTokens * kTileRowBytes);
    device::copy_async_commit();
  }

  float sums[2][kTokens / 2] = {};
  // The row that this lane addresses for ldmatrix: matrices 0 and 1 are rows 0–7 (k 0–7, 8–15), 2 and 3 rows 8–15.
  const int matrix_row = (lane & 7) + (lane >> 4) * 8, matrix_chunk = (lane >> 3) & 1;
  for (int tile = 0; tile < tiles; ++tile) {
    device::copy_async_wait<kStages - 2>();
    __syncthreads();  // the tile has arrived for all threads, and none reads the stage that is filled next
    const int ahead = tile + kStages - 1;
    if (ahead < tiles) copies.issue(stages + ahead % kStages * kTokens * kTileRowBytes);
    device::copy_async_commit();
    if (tile + 1 < tiles) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (half_passes(kType) > 1 && tile + 1 == weight_tiles) {
          cursor[i] = typename Tile::Cursor(stripes.at[i], 0, lane);
        } else {
          cursor[i].advance();
        }
        next[i].load(cursor[i]);
      }
    }
    if (tile + kPrefetchTiles < weight_tiles) {
#pragma unroll
      for (int i = 0; i < 2; ++i) cursor[i].prefetch(kPrefetchTiles - 1, lane);
    }

    const uint32_t stage = stages + tile % kStages * kTokens * kTileRowBytes;
    for_each_step([&]<int kStep>() {
      uint32_t a[2][4];
      now[0].template fragment<kStep>(a[0]);
      now[1].template fragment<kStep>(a[1]);
#pragma unroll
      for (int nb = 0; nb < kTokens / 16; ++nb) {
        const int row = nb * 16 + matrix_row;
        uint32_t b[4];
        device::load_matrix_x4(b, stage + row * kTileRowBytes + (((2 * kStep + matrix_chunk) ^ (row & 7)) << 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float(&low)[4] = *reinterpret_cast<float(*)[4]>(&sums[i][8 * nb]);
          float(&high)[4] = *reinterpret_cast<float(*)[4]>(&sums[i][8 * nb + 4]);
          device::mma_f16(low, a[i], b[0], b[1]);
          device::mma_f16(high, a[i], b[2], b[3]);
        }
      }
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) now[i] = next[i];
  }
  gemm_epilogue<kTokens, kWarps>(p, block, sums, shared);
}

// A kernel must request more than 48 KiB of shared memory, once for each device.
template <typename Kernel>
void allow_shared(Kernel kernel, int bytes) {
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

template <DType kType, int kTokens, int kWarps>
void gemm_mma_block(const Problem& p, CUstream_st* stream) {
  if constexpr (!instance_compiled("mma", kType, {kTokens, kWarps})) {
    throw_left_out("mma", kType, {kTokens, kWarps});
  } else {
    constexpr int kBytes = gemm_shared_bytes(kTokens, kWarps);
    const auto kernel = gemm_mma_kernel<kType, kTokens, kWarps>;
    allow_shared(kernel, kBytes);
    kernel<<<gemm_grid(p, kTokens, kWarps), 32 * kWarps, kBytes, stream>>>(p);
  }
}

template <DType kType>
void gemm_mma(const Problem& p, int tokens, int warps, CUstream_st* stream) {
  const auto with_warps = [&]<int kWarps>() {
    switch (tokens) {
      case 16:
        return gemm_mma_block<kType, 16, kWarps>(p, stream);
      case 32:
        return gemm_mma_block<kType, 32, kWarps>(p, stream);
      case 64:
        return gemm_mma_block<kType, 64, kWarps>(p, stream);
      default:
        return gemm_mma_block<kType, 128, kWarps>(p, stream);
    }
  };
  if (warps == 4) {
    with_warps.template operator()<4>();
  } else {
    with_warps.template operator()<8>();
  }
}

}  // namespace dyno::ops::cuda
