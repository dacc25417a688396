// The end of a product of gemm_ring.cuh and gemm_codes.cuh: adds the sums of the blocks that share k, and writes y.
#pragma once

#include "device/cluster_shared.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/gemm_ring.h"

namespace dyno::ops::cuda {

#if __CUDA_ARCH__ >= 900

// The product whose rows this block has, and the index of its tile of rows.
struct GemmRingProduct {
  const uint8_t* w;
  const float* bias;
  float* y;
  int64_t y_stride;
  int n, row_tile;

  template <bool kSeveral>
  static __device__ __forceinline__ GemmRingProduct of(const Problem& p, int rows) {
    GemmRingProduct out{p.w, p.bias, p.y, p.y_stride, p.n, static_cast<int>(blockIdx.y)};
    if constexpr (kSeveral) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tiles = (out.n + rows - 1) / rows;
        if (p.more[i].n == 0 || out.row_tile < tiles) break;
        const Part& next = p.more[i];
        out = {next.w, next.bias, next.y, next.y_stride, next.n, out.row_tile - tiles};
      }
    }
    return out;
  }
};

// Four adjacent sums of one token, added over the planes of all blocks.
__device__ __forceinline__ void gemm_ring_add(uint32_t shared, const GemmRingShape& shape, int plane_bytes,
                                              float (&sum)[4]) {
#pragma unroll 4
  for (int i = 0; i < shape.parts * shape.planes(); ++i) {
    const int part = shape.planes() == 2 ? i >> 1 : i, plane = shape.planes() == 2 ? i & 1 : 0;
    const float4 v = device::load_cluster_float4(device::cluster_address(shared + plane * plane_bytes, part));
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
}

// Loads up to four adjacent values. `quad`: four may be read at once.
__device__ __forceinline__ void gemm_ring_load(const float* from, int there, bool quad, float (&to)[4]) {
  if (quad && there == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < there) to[i] = from[i];
  }
}

// Four adjacent values of y of one token, and the inputs of their epilogue except the sums.
struct GemmRingItem {
  int64_t to = 0;     // their index in y
  uint32_t from = 0;  // shared address of their sums
  int there = 0;      // number of existing values
  float scale = 0, bias[4] = {}, bias_up[4] = {}, rest[4] = {};
};

// The epilogue for this block's share of the tokens: `sums` of every block have [planes][kTokens][sums_stride]. load()
// requests the inputs from memory. This takes as long as the cluster barrier, so it is called before the barrier for
// the first item of each thread. kScaled: the sums are already multiplied by the scales of x.
template <int kTokens, bool kSeveral, bool kScaled = false>
struct GemmRingEpilogue {
  const Problem& p;
  const GemmRingProduct& product;
  const GemmRingShape& shape;
  const float* scales;
  int matrix, rank, threads, quads_log2, first_column, share;
  uint32_t sums;
  // Whether four adjacent values of y, and of the residual, can be accessed at once: n is a multiple of four.
  bool quads_of_y;

  __device__ __forceinline__ GemmRingEpilogue(const Problem& problem, const GemmRingProduct& of,
                                              const TiledRows& format, const GemmRingShape& s, int of_matrix,
                                              int rank_of_block, uint32_t sums_at, int warps)
      : p(problem), product(of), shape(s), matrix(of_matrix), rank(rank_of_block), threads(32 * warps), sums(sums_at) {
    quads_log2 = shape.quads_log2 - (p.gated() ? 1 : 0);
    first_column = shape.first_of(rank, kTokens), share = shape.first_of(rank + 1, kTokens) - first_column;
    scales = reinterpret_cast<const float*>(p.x + format.scales_at()) +
             (matrix * format.token_tiles() + blockIdx.x) * kTokens;
    quads_of_y = (reinterpret_cast<uint64_t>(product.y) | reinterpret_cast<uint64_t>(p.residual) |
                  static_cast<uint64_t>((product.y_stride | p.y_batch_stride) * 4)) %
                     16 ==
                 0;
  }
  __device__ __forceinline__ int items() const { return share << quads_log2; }

  __device__ __forceinline__ GemmRingItem load(int number) const {
    GemmRingItem item;
    const bool gated = p.gated();
    const int first = blockIdx.x * kTokens, column = first_column + (number >> quads_log2);
    const int quad = number & ((1 << quads_log2) - 1), row = ((product.row_tile << quads_log2) + quad) * 4;
    if (number >= items() || first + column >= p.rows || row >= product.n) return item;
    // For a gated pair, each warp has 16 rows of the gate before 16 rows of up.
    const int place = gated ? quad / 4 * 32 + quad % 4 * 4 : quad * 4;
    item.from = sums + (column * shape.sums_stride + place) * 4;
    item.to = matrix * p.y_batch_stride + (first + column) * product.y_stride + row;
    item.there = min(product.n - row, 4);
    item.scale = kScaled ? 1.0f : scales[column];
    if (product.bias != nullptr) gemm_ring_load(product.bias + row, item.there, false, item.bias);
    if (gated && p.bias_up != nullptr) gemm_ring_load(p.bias_up + row, item.there, false, item.bias_up);
    if (!kSeveral && !gated && p.residual != nullptr) {
      gemm_ring_load(p.residual + item.to, item.there, quads_of_y, item.rest);
    }
    return item;
  }

  __device__ __forceinline__ void store(const GemmRingItem& item) const {
    if (item.there == 0) return;
    const bool gated = p.gated();
    const int plane_bytes = kTokens * shape.sums_stride * 4;
    float sum[4] = {}, up[4] = {}, y[4];
    gemm_ring_add(item.from, shape, plane_bytes, sum);
    if (gated) gemm_ring_add(item.from + kGpuRows * 4, shape, plane_bytes, up);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (gated) {
        y[i] = activate(p.activation, fmaf(sum[i], item.scale, item.bias[i]), fmaf(up[i], item.scale, item.bias_up[i]));
      } else {
        y[i] = fmaf(sum[i], item.scale, item.bias[i]);
        if constexpr (!kSeveral) y[i] = fmaf(y[i], p.scale, item.rest[i]);
      }
    }
    if (quads_of_y && item.there == 4) {
      *reinterpret_cast<float4*>(product.y + item.to) = make_float4(y[0], y[1], y[2], y[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < item.there) product.y[item.to + i] = y[i];
      }
    }
  }

  // Called after all blocks have written their sums. `item`: the first item of this thread. A load cannot pass a store,
  // so the next item is loaded before this one is stored.
  __device__ __forceinline__ void finish(GemmRingItem item) const {
    for (int number = threadIdx.x; number < items(); number += threads) {
      const GemmRingItem next = load(number + threads);
      store(item);
      item = next;
    }
  }
};

#endif

}  // namespace dyno::ops::cuda
