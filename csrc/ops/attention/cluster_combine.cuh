// The end of a tile whose keys are divided among the blocks of clusters. Each block adds a slice of the dimensions over
// the shared memory of all blocks in its cluster. Results of several clusters are combined in the workspace. The order
// of additions is always the same.
//
// direct_parts.cuh combines without clusters, in a launch of its own, since up to 132 parts lie in the workspace. Here
// at most 16 results of clusters lie there. Their last blocks add them while the launch still runs, because a second
// launch would cost more than these additions.
#pragma once

#include "device/cluster_shared.cuh"
#include "device/ptx.cuh"
#include "ops/attention/direct.cuh"

namespace dyno::ops {

#if __CUDA_ARCH__ >= 900
namespace clustered {

struct Sum {
  float top = minus_infinity();  // in units of log2
  float total = 0;
  float4 value = make_float4(0, 0, 0, 0);
};
// Adds `count` (at most kMost) parts; all loads are issued before the first use.
template <int kMost, typename LoadStat, typename LoadValue>
__device__ __forceinline__ Sum add_parts(int count, const LoadStat& stat, const LoadValue& value) {
  float2 stats[kMost];
  float4 values[kMost];
#pragma unroll
  for (int b = 0; b < kMost; ++b) {
    stats[b] = b < count ? stat(b) : make_float2(minus_infinity(), 0);
    values[b] = b < count ? value(b) : make_float4(0, 0, 0, 0);
  }
  Sum sum;
#pragma unroll
  for (int b = 0; b < kMost; ++b) sum.top = fmaxf(sum.top, stats[b].x);
  const float base = sum.top == minus_infinity() ? 0.0f : sum.top;
#pragma unroll
  for (int b = 0; b < kMost; ++b) {
    const float w = exp2f(stats[b].x - base);
    sum.total += stats[b].y * w;
    sum.value.x += values[b].x * w, sum.value.y += values[b].y * w;
    sum.value.z += values[b].z * w, sum.value.w += values[b].w * w;
  }
  return sum;
}

__device__ __forceinline__ void write_row(const CudaAttention& t, const CudaTile& tile, int row, int kv_head, int dim,
                                          const Sum& sum) {
  const float factor = output_factor(t, tile.row_begin + row, kv_head, sum.top * direct::kLn2, sum.total);
  float* out = output_row(t, tile, tile.row_begin + row, kv_head) + dim;
  out[0] = sum.value.x * factor, out[1] = sum.value.y * factor;
  out[2] = sum.value.z * factor, out[3] = sum.value.w * factor;
}

// Must be called by every thread of every block of a cluster with work. `results` [kRows][pitch] and `stats` {maximum
// in units of log2, sum} are shared memory that the block has written; `active` blocks of the tile have results;
// `cluster` is the index of this cluster.
template <int kRows>
__device__ __forceinline__ void combine(const CudaAttention& t, const CudaTile& tile, int kv_head, int cluster,
                                        int active, const float* results, int pitch, const float2* stats) {
  const int rank = device::block_of_cluster(), members = min(kClusterBlocks, active - cluster * kClusterBlocks);
  const int clusters = (active + kClusterBlocks - 1) / kClusterBlocks;
  const int quads = (t.dv / 4 + kClusterBlocks - 1) / kClusterBlocks;  // per block
  const int items = tile.rows() * quads;
  const direct::Partials parts(t, kRows, kv_head);
  device::cluster_arrive();
  device::cluster_wait();  // the results of all blocks are written
  for (int i = static_cast<int>(threadIdx.x); i < items; i += static_cast<int>(blockDim.x)) {
    const int row = i / quads, dim = (rank * quads + i % quads) * 4;
    if (dim >= t.dv) continue;
    const uint32_t stat = device::shared_address(stats + row),
                   value = device::shared_address(results + row * pitch + dim);
    const Sum sum = add_parts<kClusterBlocks>(
        members, [&](int b) { return device::load_cluster_float2(device::cluster_address(stat, b)); },
        [&](int b) { return device::load_cluster_float4(device::cluster_address(value, b)); });
    if (clusters == 1) {
      write_row(t, tile, row, kv_head, dim, sum);
    } else {
      *reinterpret_cast<float4*>(parts.values + (int64_t{cluster} * kRows + row) * t.dv + dim) = sum.value;
      // All blocks of a cluster write the same numbers here, so that each block can count separately.
      parts.stats[cluster * kRows + row] = make_float2(sum.top, sum.total);
    }
  }
  device::cluster_arrive();  // the results of other blocks were read
  if (clusters > 1) {
    __shared__ bool last;
    __threadfence();  // this thread's part is visible to the block that counts last
    __syncthreads();  // … and so are those of the whole block
    if (threadIdx.x == 0) {
      int32_t* counter = t.counters + (static_cast<int>(blockIdx.x) * t.kv_heads + kv_head) * kClusterBlocks + rank;
      last = atomicAdd(counter, 1) == clusters - 1;
      if (last) *counter = 0;  // for the next launch
    }
    __syncthreads();
    if (last) {
      __threadfence();  // the parts of other clusters are read after their counts
      for (int i = static_cast<int>(threadIdx.x); i < items; i += static_cast<int>(blockDim.x)) {
        const int row = i / quads, dim = (rank * quads + i % quads) * 4;
        if (dim >= t.dv) continue;
        const Sum sum = add_parts<kMostClusters>(
            clusters, [&](int c) { return __ldcg(&parts.stats[c * kRows + row]); },
            [&](int c) {
              return __ldcg(reinterpret_cast<const float4*>(parts.values + (int64_t{c} * kRows + row) * t.dv + dim));
            });
        write_row(t, tile, row, kv_head, dim, sum);
      }
    }
  }
  device::cluster_wait();  // no block may end while its memory is read
}

}  // namespace clustered
#endif

}  // namespace dyno::ops
