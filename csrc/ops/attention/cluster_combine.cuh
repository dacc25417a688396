// The end of a tile whose keys are divided among the blocks of clusters. Each block adds a slice of the dimensions,
// which all blocks of its cluster with keys send to its shared memory; its barrier counts the bytes. Reading the
// memory of other blocks needs a cluster barrier before and after. Results of several clusters are combined in the
// workspace. The order of additions is always the same.
//
// direct_parts.cuh combines without clusters, in a launch of its own, since up to 132 parts lie in the workspace. Here
// at most 16 results of clusters lie there. Their last blocks add them while the launch still runs, because a second
// launch would cost more than these additions.
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
  const direct::Partials parts(t, kRows, kv_head);
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
  // The elements of a row's quad: of all rows of the slice, one after the other.
  const auto each = [&](const auto& f) {
    for (int i = static_cast<int>(threadIdx.x); i < tile.rows() * kQuads; i += static_cast<int>(blockDim.x)) {
      const int row = i / kQuads, dim = rank * kSliceDims + i % kQuads * 4;
      if (dim < t.dv) f(row, dim);
    }
  };
  each([&](int row, int dim) {
    const Sum sum = add_parts<kClusterBlocks>(
        members, [&](int b) { return make_float2(sent.stats[b][row].x, sent.stats[b][row].y); },
        [&](int b) { return *reinterpret_cast<const float4*>(&sent.values[b][row][dim - rank * kSliceDims]); });
    if (clusters == 1) return write_row(t, tile, row, kv_head, dim, sum);
    *reinterpret_cast<float4*>(parts.values + (int64_t{cluster} * kRows + row) * t.dv + dim) = sum.value;
    // All blocks of a cluster write the same numbers here, so that each block can count separately.
    parts.stats[cluster * kRows + row] = make_float2(sum.top, sum.total);
  });
  if (clusters == 1) return;
  __shared__ bool last;
  __threadfence();  // this thread's part is visible to the block that counts last
  __syncthreads();  // … and so are those of the whole block
  if (threadIdx.x == 0) {
    int32_t* counter = t.counters + (static_cast<int>(blockIdx.x) * t.kv_heads + kv_head) * kClusterBlocks + rank;
    last = atomicAdd(counter, 1) == clusters - 1;
    if (last) *counter = 0;  // for the next launch
  }
  __syncthreads();
  if (!last) return;
  __threadfence();  // the parts of other clusters are read after their counts
  each([&](int row, int dim) {
    const Sum sum = add_parts<kMostClusters>(
        clusters, [&](int c) { return __ldcg(&parts.stats[c * kRows + row]); },
        [&](int c) {
          return __ldcg(reinterpret_cast<const float4*>(parts.values + (int64_t{c} * kRows + row) * t.dv + dim));
        });
    write_row(t, tile, row, kv_head, dim, sum);
  });
}

#endif

}  // namespace clustered

}  // namespace dyno::ops
