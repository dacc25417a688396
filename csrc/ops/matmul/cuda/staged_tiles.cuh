// The division of work in gemm_staged.cuh: tiles of the experts' rows, the next tile of a block, and the epilogue.
//
// A tile has up to 128 rows of x by 64·kBlocks·2 rows of w ("blocks" of 64). For a gated pair, a block has 32 rows of
// each matrix, interleaved so that a thread has gate and up of the same column in its own sums: of every 16 rows, 8
// belong to the gate and 8 to up.
#pragma once

#include "device/wgmma_shared.cuh"
#include "ops/matmul/cuda/gemm_tile.cuh"

namespace dyno::ops::cuda {

inline constexpr int kStagedStages = 4;
inline constexpr int kStagedBlockBytes = 64 * kTileRowBytes;  // 64 rows of w by 64 k
inline constexpr int kStagedTokenBytes = kStagedTokens * kTileRowBytes;
// Consecutive tiles share rows of x in groups of this many tiles of tokens, so that x stays in L2.
inline constexpr int kTokenGroup = 16;

template <int kBlocks>
inline constexpr int kStagedStageBytes = 2 * kBlocks * kStagedBlockBytes + kStagedTokenBytes;
struct StagedTile {
  GemmBlock tokens;
  int row_tile;
};

// The properties of a tile for the multiplying warpgroups. The filling warpgroup writes them and signals a barrier per
// info. With at least one stage per tile, the filling warpgroup starts at most kStagedStages + 1 tiles ahead of a tile
// whose sums are still being stored; so at most one more than that are in use.
struct StagedInfo {
  StagedTile tile;
  RowTarget targets[kStagedTokens];
};
inline constexpr int kStagedInfos = kStagedStages + 2;
inline constexpr int kStagedBarrierBytes = 128;
static_assert(kStagedStages * 16 + kStagedInfos * 8 <= kStagedBarrierBytes);

// Stages, barriers, infos, and padding for alignment.
template <int kBlocks>
inline constexpr int kStagedShared = kStagedStages * kStagedStageBytes<kBlocks> + kStagedBarrierBytes +
                                     kStagedInfos * static_cast<int>(sizeof(StagedInfo)) + 1024;

// Tiles are numbered with token tiles running fastest; the blocks of the grid take them in a cycle.
struct StagedTiles {
  int token_tiles, row_tiles, count;

  __device__ __forceinline__ StagedTiles(const Problem& p, int rows_of_w) {
    row_tiles = (p.n + rows_of_w - 1) / rows_of_w;
    token_tiles = p.groups[p.last_matrix] - p.groups[p.first_matrix];
    count = token_tiles * row_tiles;
  }
  __device__ __forceinline__ StagedTile tile(const Problem& p, int index) const {
    const int group = index / (kTokenGroup * row_tiles), first = group * kTokenGroup;
    const int width = min(kTokenGroup, token_tiles - first);
    index -= first * row_tiles;
    const int token_tile = first + index % width, row_tile = index / width;
    const int32_t* first_tile = p.groups;
    const int32_t* first_row = p.groups + p.matrices + 1;
    const int wanted = first_tile[p.first_matrix] + token_tile;
    int low = p.first_matrix, high = p.last_matrix;  // finds the last matrix whose first tile is at or before `wanted`
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile[middle] <= wanted) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int row = first_row[low] + (wanted - first_tile[low]) * kStagedTokens;
    return {{low, row, min(kStagedTokens, first_row[low + 1] - row)}, row_tile};
  }
};

// The destination of a row of x of a tile, and its scale.
__device__ __forceinline__ RowTarget staged_target(const Problem& p, const GemmBlock& block, int row) {
  if (row >= block.rows) return {0, 0.0f};
  const int64_t k_bytes = p.passes * ((p.k + kGpuTile - 1) / kGpuTile * kTileRowBytes);
  return {y_row(p, block, row) * p.y_stride, *reinterpret_cast<const float*>(x_row(p, block, row) + k_bytes)};
}

// sums[4·nb + e]: row g + 8·(e / 2) of this warp's 16, row 8·nb + 2·t + e % 2 of the tile. `first_of_w`: the row of w
// that is the first of the 16 (gated: of 8).
__device__ __forceinline__ void staged_epilogue(const Problem& p, const GemmBlock& block, int first_of_w, int lane,
                                                const float (&sums)[kStagedTokens / 2], const RowTarget* targets) {
  const int g = lane >> 2, t = lane & 3;
  const bool gated = p.gated();
  const int64_t bias_of = static_cast<int64_t>(block.matrix) * p.n;
  float bias[2];
  bool valid[2];
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const int row = first_of_w + g + (gated ? 0 : 8 * q);
    const float* from = gated && q == 1 ? p.bias_up : p.bias;
    valid[q] = row < p.n;
    bias[q] = from != nullptr && valid[q] ? from[bias_of + row] : 0.0f;
  }
  float* y_base = p.y + first_of_w + g;
#pragma unroll
  for (int nb = 0; nb < kStagedTokens / 8; ++nb) {
    if (8 * nb >= block.rows) break;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * nb + 2 * t + e;
      if (column >= block.rows) continue;
      const RowTarget to = targets[column];
      float v[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) v[q] = fmaf(sums[4 * nb + e + 2 * q], to.x_scale, bias[q]);
      float* y = y_base + to.y_at;
      if (gated) {
        if (valid[0]) *y = activate(p.activation, v[0], v[1]);
        continue;
      }
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        if (valid[q]) y[8 * q] = v[q];
      }
    }
  }
}

}  // namespace dyno::ops::cuda
