// The partial rows that blocks of direct attention write to the workspace, and a launch that adds them.
#pragma once

#include <cuda_runtime.h>

#include "ops/attention/tile.cuh"

namespace dyno::ops::direct {

inline constexpr float kLn2 = 0.6931471805599453f;

// Partial results: values [tile][kv head][split][rows][dv], then {maximum in units of log2, sum} of each.
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

// Adds the parts of kCombineDims dimensions of row blockIdx.z / pieces with kCombineThreads threads. A separate launch
// is worth it for parts that are as large as a short cache, which is too much work for the last block. Each of four
// warps adds a quarter of the parts.
inline constexpr int kCombineDims = 128, kCombineThreads = 128;
template <int kRows>
__device__ __forceinline__ void combine_piece(const CudaAttention& t, const CudaTile& tile, int active) {
  __shared__ float factors[kMostSplits];
  __shared__ float4 sums[4][32];
  __shared__ float scratch[2][4];
  const int kv_head = blockIdx.y, pieces = (t.dv + kCombineDims - 1) / kCombineDims;
  const int row = blockIdx.z / pieces, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (row >= tile.rows() || active == 1) return;  // a single part was written directly
  const Partials parts(t, kRows, kv_head);
  float best = minus_infinity();
  for (int s = threadIdx.x; s < active; s += 128) best = fmaxf(best, parts.stats[s * kRows + row].x);
  best = device::block_max(best, scratch[0]);
  const float base = best == minus_infinity() ? 0.0f : best;
  float total = 0;
  for (int s = threadIdx.x; s < active; s += 128) {
    const float2 stat = parts.stats[s * kRows + row];
    factors[s] = exp2f(stat.x - base);
    total += stat.y * factors[s];
  }
  total = device::block_sum(total, scratch[1]);
  const int dim = blockIdx.z % pieces * kCombineDims + lane * 4;
  float4 sum = make_float4(0, 0, 0, 0);
  if (dim < t.dv) {
#pragma unroll 8
    for (int s = warp; s < active; s += 4) {
      const float4 v = *reinterpret_cast<const float4*>(parts.values + (int64_t{s} * kRows + row) * t.dv + dim);
      const float w = factors[s];
      sum.x += v.x * w, sum.y += v.y * w, sum.z += v.z * w, sum.w += v.w * w;
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();  // the warps' sums are written
  if (warp > 0 || dim >= t.dv) return;
  const float factor = output_factor(t, tile.row_begin + row, kv_head, best * kLn2, total);
  float* out = output_row(t, tile, tile.row_begin + row, kv_head) + dim;
  const float4 a = sums[0][lane], b = sums[1][lane], c = sums[2][lane], d = sums[3][lane];
  out[0] = ((a.x + b.x) + (c.x + d.x)) * factor;
  out[1] = ((a.y + b.y) + (c.y + d.y)) * factor;
  out[2] = ((a.z + b.z) + (c.z + d.z)) * factor;
  out[3] = ((a.w + b.w) + (c.w + d.w)) * factor;
}

}  // namespace dyno::ops::direct
