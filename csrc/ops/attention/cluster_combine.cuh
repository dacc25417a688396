// The end of a tile whose keys are divided among the blocks of clusters. Each block adds a slice of the dimensions,
// which all blocks of its cluster with keys send to its shared memory; its barrier counts the bytes. Reading the
// memory of other blocks needs a cluster barrier before and after. The order of additions is always the same. A launch
// of its own adds the results of several clusters (add_parts.cuh).
#pragma once

#include "device/bulk_copy.cuh"
#include "device/cluster_shared.cuh"
#include "device/mbarrier.cuh"
#include "device/ptx.cuh"
#include "ops/attention/direct.cuh"

namespace dyno::ops {

namespace clustered {

// The dimensions of a block of a cluster.
inline constexpr int kSliceDims = kLatentMaxValue / kClusterBlocks;

// Parts of a block's slice that the blocks of its cluster send.
template <int kRows>
struct Sent {
  float values[kClusterBlocks][kRows][kSliceDims];
  float4 stats[kClusterBlocks][kRows];  // maximum in units of log2, sum
  uint64_t arrived;
};

#if __CUDA_ARCH__ >= 900

// The blocks of cluster `cluster` that have keys, if `active` blocks of the tile have some.
__device__ __forceinline__ int members_of(int cluster, int active) {
  return min(kClusterBlocks, active - cluster * kClusterBlocks);
}

// Must be called by every thread of every block of a cluster with work, before combine().
template <int kRows>
__device__ __forceinline__ void expect(Sent<kRows>& sent, int members) {
  if (threadIdx.x == 0) {
    const uint32_t barrier = device::shared_address(&sent.arrived);
    device::barrier_init(barrier, 1);
    device::barrier_init_done();
    device::barrier_arrive_for_bytes(barrier,
                                     members * static_cast<int>(sizeof(sent.values[0]) + sizeof(sent.stats[0])));
  }
  device::cluster_arrive_relaxed();  // this block runs, and its barrier is initialised
}

// Must be called by every thread of every block of a cluster with work. `results` [kRows][pitch] and `stats` {maximum
// in units of log2, sum} are shared memory that the block has written; `active` blocks of the tile have results;
// `cluster` is the index of this cluster.
template <int kRows>
__device__ __forceinline__ void combine(const CudaAttention& t, const CudaTile& tile, int kv_head, int cluster,
                                        int active, const float* results, int pitch, const float2* stats,
                                        Sent<kRows>& sent) {
  constexpr int kQuads = kSliceDims / 4;
  const int rank = device::block_of_cluster(), members = members_of(cluster, active);
  const int clusters = (active + kClusterBlocks - 1) / kClusterBlocks;
  const direct::Partials partials(t, kRows, kv_head);
  device::cluster_wait();  // all blocks are running
  __syncthreads();         // the results of this block are written
  const uint32_t barrier = device::shared_address(&sent.arrived);
  if (rank < members) {
    const auto send = [&](const void* to, int block, const float4& v) {
      device::send_cluster_float4(device::cluster_address(device::shared_address(to), block), v,
                                  device::cluster_address(barrier, block));
    };
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kLatentMaxValue / 4; i += static_cast<int>(blockDim.x)) {
      const int row = i / (kLatentMaxValue / 4), quad = i % (kLatentMaxValue / 4);
      send(&sent.values[rank][row][quad % kQuads * 4], quad / kQuads,
           *reinterpret_cast<const float4*>(results + row * pitch + quad * 4));
    }
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kClusterBlocks; i += static_cast<int>(blockDim.x)) {
      const float2 stat = stats[i % kRows];
      send(&sent.stats[rank][i % kRows], i / kRows, make_float4(stat.x, stat.y, 0, 0));
    }
  }
  device::barrier_wait(barrier, 0);  // the parts of this block's slice have arrived
  // The quads of all rows of the slice, one row after the other.
  for (int i = static_cast<int>(threadIdx.x); i < tile.rows() * kQuads; i += static_cast<int>(blockDim.x)) {
    const int row = i / kQuads, quad = i % kQuads, dim = rank * kSliceDims + 4 * quad;
    if (dim >= t.dv) continue;
    parts::Sum sum;
    sum.add<kClusterBlocks>(
        members, [&](int b) { return make_float2(sent.stats[b][row].x, sent.stats[b][row].y); },
        [&](int b) { return *reinterpret_cast<const float4*>(&sent.values[b][row][4 * quad]); });
    if (clusters == 1) {
      sum.write(t, tile, row, kv_head, dim);
    } else {
      *reinterpret_cast<float4*>(partials.values + (int64_t{cluster} * kRows + row) * t.dv + dim) = sum.value;
      // All blocks of the cluster write the same numbers here.
      partials.stats[cluster * kRows + row] = make_float2(sum.top, sum.total);
    }
  }
}

#endif

}  // namespace clustered

}  // namespace dyno::ops
