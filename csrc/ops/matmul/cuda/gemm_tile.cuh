// Code that the two tensor-core kernels share: the rows of a block, its copies of x, and its epilogue.
//
// A block multiplies up to kTokens rows of x by 32 rows of w per warp (two stripes; gated: one stripe of each matrix).
// x goes through shared memory in tiles of 64 k, as rows of 128 bytes in the 128-byte swizzle: 16-byte chunk c of row r
// is at c ^ (r & 7), which ldmatrix reads without bank conflicts and wgmma supports. Weights go from global memory
// directly to registers, because Layout::gpu is in fragment order.
#pragma once

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

constexpr int gemm_shared_bytes(int tokens) { return kStages * tokens * kTileRowBytes + 1024; }

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
  const int tile = first_tile[p.first_matrix] + blockIdx.x;
  if (tile >= first_tile[p.last_matrix]) return {0, 0, 0};
  int low = p.first_matrix, high = p.last_matrix;  // finds the last matrix whose first tile is at or before `tile`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int first = first_row[low] + (tile - first_tile[low]) * kTokens;
  return {low, first, min(kTokens, first_row[low + 1] - first)};
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
  int row_of_w[2];

  __device__ __forceinline__ WarpStripes(const Problem& p, int matrix, int warp, int warps) {
    const int64_t bytes = gpu_stripe_bytes(kType, p.k);
    const RowPart part = row_part(p, blockIdx.y, rows_of_block(p, warps));
    const int stripes = (part.n + kGpuRows - 1) / kGpuRows;
    const int first = (part.tile * warps + warp) * (p.gated() ? 1 : 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int index = p.gated() ? first : first + i;
      row_of_w[i] = index * kGpuRows;
      at[i] = (p.gated() && i == 1 ? p.w_up : part.w) + matrix * p.w_stride + min(index, stripes - 1) * bytes;
    }
  }
};

// The destination of a row of the block, and its scale; loaded once per block.
struct RowTarget {
  int64_t y_at;
  float x_scale;
};

// sums[i][4·nb + e]: row g + 8·(e / 2) of stripe i, row 8·nb + 2·t + e % 2 of the block. `shared` is free after all
// warps have reached this function.
template <int kTokens>
__device__ __forceinline__ void gemm_epilogue(const Problem& p, const GemmBlock& block, const int (&row_of_w)[2],
                                              int lane, const float (&sums)[2][kTokens / 2], uint8_t* shared) {
  RowTarget* targets = reinterpret_cast<RowTarget*>(shared);
  const int64_t k_bytes = p.passes * ((p.k + kGpuTile - 1) / kGpuTile * kTileRowBytes);
  const int64_t batch_at = p.grouping == Grouping::dense ? block.matrix * p.y_batch_stride : 0;
  const RowPart part = row_part(p, blockIdx.y, rows_of_block(p, static_cast<int>(blockDim.x) / 32));
  __syncthreads();  // no warp reads tiles of x any longer
  if (threadIdx.x < block.rows) {
    const int i = threadIdx.x;
    targets[i] = {batch_at + y_row(p, block, i) * part.y_stride,
                  *reinterpret_cast<const float*>(x_row(p, block, i) + k_bytes)};
  }
  __syncthreads();  // targets are known

  const int g = lane >> 2, t = lane & 3;
  const int64_t bias_of = p.grouping == Grouping::experts ? static_cast<int64_t>(block.matrix) * p.n : 0;
  const bool gated = p.gated();
  // The four rows of w of this lane, in the order of `sums`: stripe, then row g or g + 8.
  float bias[4];
  bool valid[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const int row = row_of_w[q / 2] + g + 8 * (q & 1);
    const float* from = gated && q >= 2 ? p.bias_up : part.bias;
    valid[q] = row < part.n;
    bias[q] = from != nullptr && valid[q] ? from[bias_of + row] : 0.0f;
  }
  float* y_base = part.y + row_of_w[0] + g;
  const float* residual_base = p.residual == nullptr ? nullptr : p.residual + row_of_w[0] + g;
#pragma unroll
  for (int nb = 0; nb < kTokens / 8; ++nb) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int column = 8 * nb + 2 * t + e;
      if (column >= block.rows) continue;
      const RowTarget to = targets[column];
      float v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) v[q] = fmaf(sums[q / 2][4 * nb + e + 2 * (q & 1)], to.x_scale, bias[q]);
      float* y = y_base + to.y_at;
      if (gated) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          if (valid[q]) y[8 * q] = activate(p.activation, v[q], v[q + 2]);
        }
        continue;
      }
      if (residual_base != nullptr) {
        const float* residual = residual_base + to.y_at;
#pragma unroll
        for (int q = 0; q < 4; ++q) v[q] = fmaf(v[q], p.scale, valid[q] ? residual[8 * q] : 0.0f);
      } else {
#pragma unroll
        for (int q = 0; q < 4; ++q) v[q] *= p.scale;
      }
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
