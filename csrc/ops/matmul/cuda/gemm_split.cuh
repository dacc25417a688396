// Few tokens on Hopper (code for 90a): products with too few rows of w for a block on every multiprocessor. The blocks
// of a cluster share k. Each runs the loop of gemm_wgmma.cuh over its part, and then adds the sums of all blocks for
// its share of the tokens, in the order of the blocks, so the bits do not depend on the number of multiprocessors.
#pragma once

#include <algorithm>

#include "core/cuda/launch_cluster.h"
#include "device/cluster_shared.cuh"
#include "device/dependent.cuh"
#include "ops/matmul/cuda/gemm_wgmma.cuh"

namespace dyno::ops::cuda {

inline constexpr int kSplitWarps = 4;
inline constexpr int kSplitRows = kSplitWarps * 2 * kGpuRows;  // rows of w per block; for a gated pair, half of them
                                                               // from each matrix
// The distance between tokens avoids bank conflicts when the lanes of a warp store sums.
inline constexpr int kSplitStride = kSplitRows + 4;

constexpr int gemm_split_bytes(int tokens) {
  return std::max(kStages * kTileRowBytes, kSplitStride * 4) * tokens + 1024;
}

#ifdef DYNO_DEVICE_WGMMA

// Four adjacent sums of one token, added over the blocks of the cluster.
__device__ __forceinline__ void add_over_cluster(uint32_t shared, int parts, float (&sum)[4]) {
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    const float4 v = device::load_cluster_float4(device::cluster_address(shared, part));
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
}

// The epilogue for this block's share of the tokens: `sums` of every block have [tokens][kSplitStride].
template <int kTokens>
__device__ __forceinline__ void split_epilogue(const Problem& p, const GemmBlock& block, int parts, int rank,
                                               uint32_t sums) {
  const bool gated = p.gated();
  const int quads = gated ? kSplitRows / 8 : kSplitRows / 4, share = kTokens / parts;
  const int64_t k_bytes = p.passes * ((p.k + kGpuTile - 1) / kGpuTile * kTileRowBytes);
  for (int item = threadIdx.x; item < share * quads; item += 32 * kSplitWarps) {
    const int column = rank * share + item / quads, quad = item % quads;
    const int row = (blockIdx.y * quads + quad) * 4;
    if (column >= block.rows || row >= p.n) continue;
    // For a gated pair, each warp has 16 rows of the gate before 16 rows of up.
    const int from = gated ? quad / 4 * 32 + quad % 4 * 4 : quad * 4;
    const uint32_t at = sums + (column * kSplitStride + from) * 4;
    float sum[4] = {}, up[4] = {};
    add_over_cluster(at, parts, sum);
    if (gated) add_over_cluster(at + kGpuRows * 4, parts, up);
    const float scale = *reinterpret_cast<const float*>(x_row(p, block, column) + k_bytes);
    const int64_t to = block.matrix * p.y_batch_stride + y_row(p, block, column) * p.y_stride + row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i >= p.n) break;
      if (gated) {
        store_gated(p, 0, row + i, to + i, sum[i] * scale, up[i] * scale);
      } else {
        store_product(p, 0, row + i, to + i, sum[i] * scale);
      }
    }
  }
}

#endif  // DYNO_DEVICE_WGMMA

template <DType kType, int kTokens>
__global__ void __launch_bounds__(32 * kSplitWarps, kGemmBlocks<kType, kTokens, kSplitWarps>)
    gemm_split_kernel(const __grid_constant__ Problem p, int parts) {
#ifdef DYNO_DEVICE_WGMMA
  device::let_next_start();
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const uint32_t stages = device::shared_address(shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = device::block_of_cluster();
  const int first = blockIdx.x * kTokens;
  const GemmBlock block{p.first_matrix + static_cast<int>(blockIdx.z) / parts, first, min(kTokens, p.rows - first)};

  const WarpStripes<kType> stripes(p, block.matrix, warp, kSplitWarps);
  const int weight_tiles = (p.k + kGpuTile - 1) / kGpuTile,
            tiles = half_passes(kType) == 2 ? p.passes * weight_tiles : weight_tiles;
  const int begin = tiles * rank / parts, end = tiles * (rank + 1) / parts;
  const int begin_of_w = half_passes(kType) == 2 && begin >= weight_tiles ? begin - weight_tiles : begin;

  using Tile = WeightTile<kType>;
  typename Tile::Cursor cursor[2] = {{stripes.at[0], begin_of_w, lane}, {stripes.at[1], begin_of_w, lane}};
  Tile now[2], next[2];
  // Weights do not depend on earlier launches: the first loads are issued before those have ended.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    now[i].load(cursor[i]);
#pragma unroll
    for (int ahead = 1; ahead < kPrefetchTiles; ++ahead) {
      if (begin + ahead < end && begin_of_w + ahead < weight_tiles) cursor[i].prefetch(ahead, lane);
    }
  }
  device::wait_for_previous();
  TokenCopies<kTokens, 32 * kSplitWarps> copies(p, block);
  copies.skip(begin);
#pragma unroll
  for (int s = 0; s < kStages - 2; ++s) {
    if (begin + s < end) copies.issue(stages + s * kTokens * kTileRowBytes);
    device::copy_async_commit();
  }

  float sums[2][kTokens / 2] = {};
  uint32_t a[2][2][4];  // [step & 1][stripe]: running products read one while the other is written
  for (int tile = begin; tile < end; ++tile) {
    const int at = tile - begin;
    device::copy_async_wait<kStages - 3>();
    device::fence_async_shared();
    __syncthreads();  // as in gemm_wgmma.cuh
    const uint64_t stage = device::wgmma_descriptor(stages + at % kStages * kTokens * kTileRowBytes);
    for_each_step([&]<int kStep>() {
      now[0].template fragment<kStep>(a[kStep & 1][0]);
      now[1].template fragment<kStep>(a[kStep & 1][1]);
      device::wgmma_fence();
      device::wgmma_f16(sums[0], a[kStep & 1][0], stage + 2 * kStep);
      device::wgmma_f16(sums[1], a[kStep & 1][1], stage + 2 * kStep);
      device::wgmma_commit();
      if constexpr (kStep == 0) {
        if (tile + 1 < end) {
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
      } else if constexpr (kStep == 1) {
        const int ahead = tile + kStages - 2;
        if (ahead < end) copies.issue(stages + (at + kStages - 2) % kStages * kTokens * kTileRowBytes);
        device::copy_async_commit();
      } else if constexpr (kStep == 2) {
        if (tile + kPrefetchTiles < min(end, weight_tiles)) {
#pragma unroll
          for (int i = 0; i < 2; ++i) cursor[i].prefetch(kPrefetchTiles - 1, lane);
        }
      }
      device::wgmma_wait<1>();
    });
#pragma unroll
    for (int i = 0; i < 2; ++i) now[i] = next[i];
  }
  device::wgmma_wait<0>();

  const int g = lane >> 2, t = lane & 3;
  float* all = reinterpret_cast<float*>(shared);
  __syncthreads();  // no warp's products read tiles of x any longer
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int nb = 0; nb < kTokens / 8; ++nb) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        all[(8 * nb + 2 * t + e % 2) * kSplitStride + (2 * warp + i) * kGpuRows + g + 8 * (e / 2)] =
            sums[i][4 * nb + e];
      }
    }
  }
  device::cluster_arrive();
  device::cluster_wait();  // the sums of all blocks are written
  split_epilogue<kTokens>(p, block, parts, rank, stages);
  device::cluster_arrive();
  device::cluster_wait();  // no block reads this block's shared memory any longer
#endif
}

template <DType kType, int kTokens>
void gemm_split_block(const Problem& p, int parts, CUstream_st* stream) {
  constexpr int kBytes = gemm_split_bytes(kTokens);
  const auto kernel = gemm_split_kernel<kType, kTokens>;
  allow_shared(kernel, kBytes);
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));  // 16 blocks
  dim3 grid = gemm_grid(p, kTokens, kSplitWarps);
  grid.z *= static_cast<unsigned>(parts);
  launch_dependent_cluster("matmul", kernel, grid, 32 * kSplitWarps, static_cast<unsigned>(parts), kBytes, stream, p,
                           parts);
}

template <DType kType>
void gemm_split(const Problem& p, int tokens, int parts, CUstream_st* stream) {
  switch (tokens) {
    case 16:
      return gemm_split_block<kType, 16>(p, parts, stream);
    case 32:
      return gemm_split_block<kType, 32>(p, parts, stream);
    case 64:
      return gemm_split_block<kType, 64>(p, parts, stream);
    default:
      return gemm_split_block<kType, 128>(p, parts, stream);
  }
}

}  // namespace dyno::ops::cuda
