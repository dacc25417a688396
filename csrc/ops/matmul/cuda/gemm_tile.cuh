// Code that the two tensor-core kernels share: the rows of a block, its copies of x, and its epilogue.
//
// A block multiplies up to kTokens rows of x by 32 rows of w per warp (two stripes; gated: one stripe of each matrix).
// x goes through shared memory in tiles of 64 k, as rows of 128 bytes in the 128-byte swizzle: 16-byte chunk c of row r
// is at c ^ (r & 7), which ldmatrix reads without bank conflicts and wgmma supports. Weights go from global memory
// directly to registers, because Layout::gpu is in fragment order.
#pragma once

#include "device/reduce.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/row_part.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

inline constexpr int kStages = 4;          // tiles of x in shared memory
inline constexpr int kTileRowBytes = 128;  // 64 f16 values
inline constexpr int kPrefetchTiles = 6;   // prefetch distance of weights into L2, in tiles

// Blocks per multiprocessor that the registers allow.
template <DType kType, int kTokens, int kWarps>
inline constexpr int kGemmBlocks = kTokens >= 128 || WeightTile<kType>::kLowWords >= 16 ? (kWarps == 4 ? 2 : 1)
                                   : kWarps == 4                                        ? (kTokens == 64 ? 3 : 4)
                                                                                        : 2;

// The destination of a row of the block, and its scale; loaded once per block.
struct RowTarget {
  int64_t y_at;
  float x_scale;
};

// gated_epilogue() moves the sums of this many columns through shared memory at a time. The distance between two
// columns avoids bank conflicts when the lanes of a warp store sums.
constexpr int epilogue_columns(int used) { return used % 32 == 0 ? 32 : used % 24 == 0 ? 24 : 16; }
constexpr int epilogue_stride(int warps) { return 2 * kGpuRows * warps + 4; }

// Shared memory has the tiles of x, later sums, and then the targets of the rows.
constexpr int gemm_targets_at(int tokens, int warps) {
  const int tiles = kStages * tokens * kTileRowBytes, sums = (tokens < 32 ? 16 : 32) * epilogue_stride(warps) * 4;
  return tiles > sums ? tiles : sums;
}
constexpr int gemm_shared_bytes(int tokens, int warps) {
  return gemm_targets_at(tokens, warps) + tokens * static_cast<int>(sizeof(RowTarget)) + 1024;
}

struct GemmBlock {
  int matrix;     // expert or batch index
  int first_row;  // index among the sorted rows, or row of x
  int rows;       // at most kTokens; 0: no work
};

// Token tiles run fastest, so that blocks that share weights run at the same time.
template <int kTokens>
__device__ __forceinline__ GemmBlock gemm_block(const Problem& p) {
  if (p.grouping == Grouping::dense) {
    const int first = blockIdx.x * kTokens;
    return {p.first_matrix + static_cast<int>(blockIdx.z), first, min(kTokens, p.rows - first)};
  }
  const int32_t* first_tile = p.groups;
  const int32_t* first_row = p.groups + p.matrices + 1;
  const int tile = first_tile[p.first_matrix] + blockIdx.x, end = first_tile[p.last_matrix];
  // Finds the last matrix whose first tile is at or before `tile`. The lanes of each warp load many of them at once,
  // because loads that depend on each other take longer.
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x & 31;
  int matrix = p.first_matrix;
  for (int from = p.first_matrix + 1; from < p.last_matrix; from += 32 * kAtOnce) {
    int32_t first[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int other = from + 32 * i + lane;
      first[i] = other < p.last_matrix ? first_tile[other] : end;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) matrix += __popc(__ballot_sync(device::kFullMask, first[i] <= tile));
  }
  if (tile >= end) return {0, 0, 0};
  const int first = first_row[matrix] + (tile - first_tile[matrix]) * kTokens;
  return {matrix, first, min(kTokens, first_row[matrix + 1] - first)};
}

// The row of y (and of p.ids) for row `i` of the block.
__device__ __forceinline__ int y_row(const Problem& p, const GemmBlock& block, int i) {
  if (p.grouping == Grouping::dense) return block.first_row + i;
  return p.groups[2 * (p.matrices + 1) + block.first_row + i];
}
__device__ __forceinline__ const uint8_t* x_row(const Problem& p, const GemmBlock& block, int i) {
  const int row = y_row(p, block, i);
  if (p.grouping == Grouping::dense) return p.x + block.matrix * p.x_batch_stride + row * p.x_stride;
  return p.x + static_cast<int64_t>(row / p.x_divisor) * p.x_stride;
}

// A thread's share of the copies of x: the same rows for every tile. The rows of a thread are multiples of 8 apart, so
// they have the same position in the swizzle.
template <int kTokens, int kThreads>
struct TokenCopies {
  static constexpr int kCount = (kTokens * 8 + kThreads - 1) / kThreads;
  static constexpr int kStep = kThreads / 8;  // rows
  const uint8_t* from[kCount];                // this thread's chunk of the next tile to copy
  uint32_t valid = 0;                         // bit i: the block has row i of this thread
  uint32_t to;                                // byte offset within a stage

  __device__ __forceinline__ TokenCopies(const Problem& p, const GemmBlock& block) {
    const int row0 = threadIdx.x / 8, chunk = threadIdx.x % 8;
    to = row0 * kTileRowBytes + ((chunk ^ (row0 & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = row0 + i * kStep;
      if (row < block.rows) valid |= 1u << i;
      from[i] = x_row(p, block, min(row, block.rows - 1)) + chunk * 16;
    }
  }
  __device__ __forceinline__ void skip(int tiles) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) from[i] += static_cast<int64_t>(tiles) * kTileRowBytes;
  }
  // Copies a tile to the stage at shared address `stage`, and advances to the next tile. Only the first kUsed rows are
  // needed.
  template <int kUsed = kTokens>
  __device__ __forceinline__ void issue(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i * kStep >= kUsed) break;
      if (kTokens * 8 >= kThreads || threadIdx.x < kTokens * 8) {
        device::copy_async_16(stage + to + i * kStep * kTileRowBytes, from[i], valid >> i & 1);
      }
      from[i] += kTileRowBytes;
      asm volatile("" : "+l"(from[i]));  // keeps the address in a register instead of recomputing it
    }
  }
};

// Rows of w of a block of `warps` warps.
__host__ __device__ constexpr int rows_of_block(const Problem& p, int warps) {
  return warps * (p.gated() ? kGpuRows : 2 * kGpuRows);
}

// The two stripes of a warp. A stripe beyond n repeats the last one; its sums are not stored.
template <DType kType>
struct WarpStripes {
  const uint8_t* at[2];

  __device__ __forceinline__ WarpStripes(const Problem& p, int matrix, int warp, int warps) {
    const int64_t bytes = gpu_stripe_bytes(kType, p.k);
    const RowPart part = row_part(p, blockIdx.y, rows_of_block(p, warps));
    const int stripes = (part.n + kGpuRows - 1) / kGpuRows;
    const int first = (part.tile * warps + warp) * (p.gated() ? 1 : 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int index = p.gated() ? first : first + i;
      at[i] = (p.gated() && i == 1 ? p.w_up : part.w) + matrix * p.w_stride + min(index, stripes - 1) * bytes;
    }
  }
};

// Called before the loop over k, because the loads depend on each other. A barrier must follow.
__device__ __forceinline__ void write_targets(const Problem& p, const GemmBlock& block, RowTarget* targets) {
  if (static_cast<int>(threadIdx.x) >= block.rows) return;
  const int64_t k_bytes = p.passes * ((p.k + kGpuTile - 1) / kGpuTile * kTileRowBytes);
  const int64_t batch_at = p.grouping == Grouping::dense ? block.matrix * p.y_batch_stride : 0;
  const RowPart part = row_part(p, blockIdx.y, rows_of_block(p, static_cast<int>(blockDim.x) / 32));
  const int i = threadIdx.x;
  targets[i] = {batch_at + y_row(p, block, i) * part.y_stride,
                *reinterpret_cast<const float*>(x_row(p, block, i) + k_bytes)};
}

// The epilogue of a gated pair. Sums go through shared memory, kColumns at a time, so that the loop that activates and
// stores them is short: unrolled code would run once per block, and would not be in the cache of instructions. Each
// thread takes four adjacent rows of w in all of its columns.
template <int kTokens, int kWarps, int kUsed>
__device__ __forceinline__ void gated_epilogue(const Problem& p, const GemmBlock& block,
                                               const float (&sums)[2][kUsed / 2], uint8_t* shared) {
  constexpr int kColumns = epilogue_columns(kUsed), kStride = epilogue_stride(kWarps), kRows = kGpuRows * kWarps;
  constexpr int kQuads = kRows / 4, kStep = 32 * kWarps / kQuads;
  static_assert(kUsed % kColumns == 0 && kColumns * kStride * 4 <= gemm_targets_at(kTokens, kWarps));
  const auto* targets = reinterpret_cast<const RowTarget*>(shared + gemm_targets_at(kTokens, kWarps));
  float* all = reinterpret_cast<float*>(shared);  // [kColumns][kStride]: rows of the gate, then of up
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int thread = static_cast<int>(threadIdx.x), quad = thread % kQuads, row = blockIdx.y * kRows + 4 * quad;
  const int count = min(4, p.n - row);
  const int64_t bias_at = p.grouping == Grouping::experts ? int64_t{block.matrix} * p.n + row : row;
  float bias[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (p.bias != nullptr && i < count) bias[0][i] = p.bias[bias_at + i];
    if (p.bias_up != nullptr && i < count) bias[1][i] = p.bias_up[bias_at + i];
  }
  float* y = p.y + row;
  const bool aligned = (reinterpret_cast<uintptr_t>(y) & 15) == 0 && p.y_stride % 4 == 0 && p.y_batch_stride % 4 == 0;
#pragma unroll
  for (int from = 0; from < kUsed; from += kColumns) {
    if (from >= block.rows) break;
    __syncthreads();  // no warp reads tiles of x, or earlier columns, any longer
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int nb = 0; nb < kColumns / 8; ++nb) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          all[(8 * nb + 2 * t + e % 2) * kStride + i * kRows + warp * kGpuRows + g + 8 * (e / 2)] =
              sums[i][from / 2 + 4 * nb + e];
        }
      }
    }
    __syncthreads();  // the sums of these columns are there
    const int columns = min(kColumns, block.rows - from);
#pragma unroll 1
    for (int column = thread / kQuads; column < columns; column += kStep) {
      const RowTarget to = targets[from + column];
      const float4* at = reinterpret_cast<const float4*>(all + column * kStride) + quad;
      const float4 gate = at[0], up = at[kQuads];
      float v[4] = {gate.x, gate.y, gate.z, gate.w};
      const float u[4] = {up.x, up.y, up.z, up.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = activate(p.activation, fmaf(v[i], to.x_scale, bias[0][i]), fmaf(u[i], to.x_scale, bias[1][i]));
      }
      if (aligned && count == 4) {
        *reinterpret_cast<float4*>(y + to.y_at) = make_float4(v[0], v[1], v[2], v[3]);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < count) y[to.y_at + i] = v[i];
      }
    }
  }
}

// sums[i][4·nb + e]: row g + 8·(e / 2) of stripe i, row 8·nb + 2·t + e % 2 of the block.
template <int kTokens, int kWarps, int kUsed = kTokens>
__device__ __forceinline__ void gemm_epilogue(const Problem& p, const GemmBlock& block,
                                              const float (&sums)[2][kUsed / 2], uint8_t* shared) {
  if (p.gated()) return gated_epilogue<kTokens, kWarps, kUsed>(p, block, sums, shared);
  const auto* targets = reinterpret_cast<const RowTarget*>(shared + gemm_targets_at(kTokens, kWarps));
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const RowPart part = row_part(p, blockIdx.y, rows_of_block(p, kWarps));
  const int first = (part.tile * kWarps + warp) * 2 * kGpuRows + g;
  const int64_t bias_at = p.grouping == Grouping::experts ? int64_t{block.matrix} * p.n : 0;
  // The four rows of w of this lane, in the order of `sums`: stripe, then row g or g + 8.
  float bias[4];
  bool valid[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    valid[q] = first + 8 * q < part.n;
    bias[q] = part.bias != nullptr && valid[q] ? part.bias[bias_at + first + 8 * q] : 0.0f;
  }
  const float* residual = p.residual == nullptr ? nullptr : p.residual + first;
#pragma unroll
  for (int nb = 0; nb < kUsed / 8; ++nb) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * nb + 2 * t + e;
      if (column >= block.rows) continue;
      const RowTarget to = targets[column];
      float v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) v[q] = fmaf(sums[q / 2][4 * nb + e + 2 * (q & 1)], to.x_scale, bias[q]);
      if (residual != nullptr) {
#pragma unroll
        for (int q = 0; q < 4; ++q) v[q] = fmaf(v[q], p.scale, valid[q] ? residual[to.y_at + 8 * q] : 0.0f);
      } else {
#pragma unroll
        for (int q = 0; q < 4; ++q) v[q] *= p.scale;
      }
      float* y = part.y + first + to.y_at;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (valid[q]) y[8 * q] = v[q];
      }
    }
  }
}

// Grid of both kernels: token tiles, row tiles, batch.
inline dim3 gemm_grid(const Problem& p, int tokens, int warps) {
  const bool experts = p.grouping == Grouping::experts;
  const int64_t tiles =
      experts ? p.rows / tokens + (p.rows < p.matrices ? p.rows : p.matrices) : (p.rows + tokens - 1) / tokens;
  return {static_cast<unsigned>(tiles), static_cast<unsigned>(row_tiles(p, rows_of_block(p, warps))),
          static_cast<unsigned>(experts ? 1 : p.last_matrix - p.first_matrix)};
}

}  // namespace dyno::ops::cuda
