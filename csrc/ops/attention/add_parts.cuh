// Parts of rows. If the keys of a tile are divided among blocks or clusters, each of them writes a part of each row to
// the workspace, and a launch of its own adds the parts, always in the same order. The last block could add them, too.
// But it would have to make its part visible, count, and read the other parts, one after the other, which takes longer
// than a launch that has started early.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/attention/tile.cuh"

namespace dyno::ops {

namespace direct {

inline constexpr float kLn2 = 0.6931471805599453f;

// Parts: values [tile][kv head][split][rows][dv], then {maximum in units of log2, sum} of each.
struct Partials {
  float* values;
  float2* stats;
  __device__ Partials(const CudaAttention& t, int rows, int kv_head) {
    const int64_t all = int64_t{gridDim.x} * t.kv_heads * t.splits * rows;
    const int64_t first = (int64_t{blockIdx.x} * t.kv_heads + kv_head) * t.splits * rows;
    values = t.partials + first * t.dv;
    stats = reinterpret_cast<float2*>(t.partials + all * t.dv) + first;
  }
};

}  // namespace direct

namespace parts {

inline constexpr int kWarps = 4, kDims = 128;  // of a block
inline constexpr int kAtOnce = 4;              // parts that a warp requests together

// Four dimensions of the sum of parts of a row.
struct Sum {
  float top = minus_infinity();  // in units of log2
  float total = 0;
  float4 value = make_float4(0, 0, 0, 0);

  // Adds `count` parts, at most kMost; all loads are issued before the first use.
  template <int kMost, typename LoadStat, typename LoadValue>
  __device__ __forceinline__ void add(int count, const LoadStat& stat, const LoadValue& load) {
    float2 stats[kMost];
    float4 values[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      stats[i] = i < count ? stat(i) : make_float2(minus_infinity(), 0);
      values[i] = i < count ? load(i) : make_float4(0, 0, 0, 0);
    }
    float best = top;
#pragma unroll
    for (int i = 0; i < kMost; ++i) best = fmaxf(best, stats[i].x);
    const float base = best == minus_infinity() ? 0.0f : best, shrink = exp2f(top - base);
    top = best;
    total *= shrink;
    value.x *= shrink, value.y *= shrink, value.z *= shrink, value.w *= shrink;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float w = exp2f(stats[i].x - base);
      total += stats[i].y * w;
      value.x += values[i].x * w, value.y += values[i].y * w, value.z += values[i].z * w, value.w += values[i].w * w;
    }
  }
  // Row `row` of the tile, dimensions [dim, dim + 4).
  __device__ __forceinline__ void write(const CudaAttention& t, const CudaTile& tile, int row, int kv_head,
                                        int dim) const {
    const float factor = output_factor(t, tile.row_begin + row, kv_head, top * direct::kLn2, total);
    float* out = output_row(t, tile, tile.row_begin + row, kv_head) + dim;
    out[0] = value.x * factor, out[1] = value.y * factor, out[2] = value.z * factor, out[3] = value.w * factor;
  }
};

// Adds the parts of kDims dimensions of one row: each warp adds every fourth part, and the first warp adds their sums.
// Count::of(t, tile) is the number of a tile's parts; a single part was written directly.
template <int kRows, typename Count, bool kSelected>
__global__ void __launch_bounds__(32 * kWarps) add_parts_kernel(const __grid_constant__ CudaAttention t) {
  __shared__ float4 values[kWarps][32];
  __shared__ float2 stats[kWarps];
  device::let_next_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv_head = blockIdx.y;
  const int pieces = (t.dv + kDims - 1) / kDims;
  const int row = blockIdx.z / pieces, dim = blockIdx.z % pieces * kDims + lane * 4;
  // The runs do not depend on launches that are still running.
  const CudaTile tile =
      kSelected ? find_tile_of<true>(t, blockIdx.x, kRows) : find_tile_warp(t, blockIdx.x, kRows, lane);
  const int count = tile.empty() ? 0 : Count::of(t, tile);
  device::wait_for_previous();
  if (row >= tile.rows() || count <= 1) return;
  const direct::Partials parts(t, kRows, kv_head);
  const bool inside = dim < t.dv;
  Sum sum;
  for (int first = warp; first < count; first += kWarps * kAtOnce) {
    const auto row_of = [&](int i) { return int64_t{first + i * kWarps} * kRows + row; };
    sum.add<kAtOnce>((count - first + kWarps - 1) / kWarps, [&](int i) { return __ldcg(&parts.stats[row_of(i)]); },
                     [&](int i) {
                       const auto* from = reinterpret_cast<const float4*>(parts.values + row_of(i) * t.dv + dim);
                       return inside ? __ldcg(from) : make_float4(0, 0, 0, 0);
                     });
  }
  values[warp][lane] = sum.value;
  if (lane == 0) stats[warp] = make_float2(sum.top, sum.total);
  __syncthreads();  // the sums of all warps are written
  if (warp > 0 || !inside) return;
  Sum all;
  all.add<kWarps>(min(count, kWarps), [&](int w) { return stats[w]; }, [&](int w) { return values[w][lane]; });
  all.write(t, tile, row, kv_head, dim);
}

}  // namespace parts

// Adds the parts that a launch with `tiles` tiles of kRows rows has written. `op`: its name in error messages.
template <int kRows, typename Count, bool kSelected = false>
void add_parts(const char* op, const CudaAttention& t, unsigned tiles, CUstream_st* stream) {
  const int pieces = (t.dv + parts::kDims - 1) / parts::kDims;
  const dim3 grid(tiles, static_cast<unsigned>(t.kv_heads),
                  static_cast<unsigned>(pieces * std::min(kRows, t.tokens * t.group)));
  launch_dependent(op, parts::add_parts_kernel<kRows, Count, kSelected>, grid, 32 * parts::kWarps, 0, stream, t);
}

}  // namespace dyno::ops
