// Products of experts for many tokens (Hopper, code for 90a), with the loop of wide tiles: clusters of two blocks are
// persistent, share rows of x, and each of their warpgroups multiplies 64 rows of w. Rows of x are sorted by expert
// (sorted.h), so one bulk copy moves a stage of any tile. A tile has 64 to 256 rows of one expert, in steps of 32:
// half-empty tiles would cost as much as full ones.
#pragma once

#include "core/cuda/check.h"
#include "core/cuda/launch_cluster.h"
#include "device/dependent.cuh"
#include "ops/instances.h"
#include "ops/matmul/cuda/sorted.h"
#include "ops/matmul/cuda/wide_epilogue.cuh"
#include "ops/matmul/cuda/wide_loop.cuh"

namespace dyno::ops::cuda {

inline constexpr int kSortedThreads = 384;
// Scales and rows of y of a tile's places, for two tiles. They are copied long before the end of a tile needs them.
struct SortedPlaces {
  float scales[kWideTokens];
  int32_t row_of[kWideTokens];
};
inline constexpr int kSortedShared =
    kWideStages * (kWideStageBytes + 16) + kWideExchangeBytes + 2 * (sizeof(SortedPlaces) + 16) + 1024;

// Jobs by number: a tile of rows and a tile of w. Jobs with the same rows follow each other.
struct SortedJobs {
  const SortedTile* tiles;
  int row_tiles, count;

  __device__ __forceinline__ SortedJobs(const Problem& p, const SortedRows& format)
      : tiles(reinterpret_cast<const SortedTile*>(p.x + format.list_at()) + 1),
        row_tiles((p.n + wide_rows(p) - 1) / wide_rows(p)),
        count(tiles[-1].matrix * row_tiles) {}
  __device__ __forceinline__ SortedTile tile(int job) const {
    const int4 v = __ldg(reinterpret_cast<const int4*>(tiles + min(job, count - 1) / row_tiles));
    return {v.x, v.y, v.z, v.w};
  }
  __device__ __forceinline__ int row_tile(int job) const { return job % row_tiles; }
};

#ifdef DYNO_DEVICE_WGMMA

struct SortedShared {
  WideStages stages;
  uint32_t barriers;     // of places
  SortedPlaces* places;  // [2]
  float4* exchange;      // sums of a gated pair
  __device__ __forceinline__ uint32_t full(uint32_t tile) const { return barriers + tile % 2 * 16; }
  __device__ __forceinline__ uint32_t empty(uint32_t tile) const { return full(tile) + 8; }
  static __device__ __forceinline__ uint32_t parity(uint32_t tile) { return tile / 2 & 1; }
};

// Called by one thread: copies this block's half of every stage of every tile to both blocks, and a tile's places.
__device__ __forceinline__ void sorted_fill(const Problem& p, const SortedRows& format, const SortedShared& shared,
                                            const SortedJobs& jobs, uint32_t rank) {
  const WideStages& stages = shared.stages;
  const int k_tiles = static_cast<int>(format.k_tiles());
  const int64_t tile_bytes = format.tile_bytes();
  uint32_t number = 0, done = 0;
  SortedTile next = jobs.tile(blockIdx.x);
  for (int job = blockIdx.x; job < jobs.count; job += gridDim.x, ++done) {
    const SortedTile tile = next;
    next = jobs.tile(job + gridDim.x);
    const auto bytes = static_cast<uint32_t>(tile.width) * 4;
    SortedPlaces& places = shared.places[done % 2];
    device::wait_at(shared.empty(done), shared.parity(done) ^ 1);
    device::barrier_arrive_expecting(shared.full(done), 2 * bytes);
    const uint8_t* at = p.x + int64_t{tile.first_place} * 4;
    device::copy_bulk(device::shared_address(places.scales), at + format.scales_at(), bytes, shared.full(done));
    device::copy_bulk(device::shared_address(places.row_of), at + format.row_of_at(), bytes, shared.full(done));
    const uint32_t half = bytes * 16;
    const uint8_t* from = p.x + int64_t{tile.first_place} * 128 + rank * half;
    for (int k = 0; k < k_tiles; ++k, ++number, from += tile_bytes) {
      device::wait_at(stages.empty(number), stages.parity(number) ^ 1);  // both blocks have finished reading the stage
      device::barrier_arrive_expecting(stages.full(number), 2 * half);
      device::copy_bulk_to(3, stages.at(number) + rank * half, from, half, stages.full(number));
    }
  }
}

// The stripe of weights that a warp multiplies in a tile.
template <DType kType>
__device__ __forceinline__ const uint8_t* sorted_stripe(const Problem& p, const SortedTile& tile, int stripe,
                                                        int group) {
  const int stripes = (p.n + kGpuRows - 1) / kGpuRows;
  const uint8_t* w = (p.gated() && group == 1 ? p.w_up : p.w) + tile.matrix * p.w_stride;
  // A stripe beyond n repeats the last one; its sums are not used.
  return w + min(stripe, stripes - 1) * gpu_stripe_bytes(kType, p.k);
}

// Stores rows of y of a gated pair; `row`: this lane's first row of w. The warpgroup of up stores the second half of
// the tokens. It exchanges the halves of its registers first, so that both groups run the same code.
template <int kTokens>
__device__ __forceinline__ void sorted_store_gated(const Problem& p, const SortedTile& tile, const SortedPlaces& places,
                                                   int row, int group, float (&sums)[kTokens / 2], float4* exchange) {
  constexpr int kHalf = kTokens / 4;
  if (group == 1) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float low = sums[i];
      sums[i] = sums[kHalf + i];
      sums[kHalf + i] = low;
    }
  }
  const int first = group * kTokens / 2 + 2 * (threadIdx.x & 3);  // token of this lane
  const WideRowsOf rows(p.n, row);
  const int64_t bias_at = int64_t{tile.matrix} * p.n;
  float bias[2], bias_up[2];
  rows.bias(p.bias == nullptr ? nullptr : p.bias + bias_at, row, bias);
  rows.bias(p.bias_up == nullptr ? nullptr : p.bias_up + bias_at, row, bias_up);
  float* y = p.y + row;
  const auto load = [&](int nb) { return *reinterpret_cast<const float2*>(places.scales + first + 8 * nb); };
  wide_activate<kTokens, 0>(p, group, load, bias, bias_up, sums, exchange, [&](int nb, const float(&v)[4]) {
    const int token = first + 8 * nb;
    const int2 to = *reinterpret_cast<const int2*>(places.row_of + token);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (token + (i & 1) < tile.rows && rows.valid[i >> 1]) {
        y[((i & 1) == 0 ? to.x : to.y) * p.y_stride + 8 * (i >> 1)] = v[i];
      }
    }
  });
}

// Stores float32 rows of y of single products.
template <int kTokens>
__device__ __forceinline__ void sorted_store_rows(const Problem& p, const SortedTile& tile, const SortedPlaces& places,
                                                  int row, const float (&sums)[kTokens / 2]) {
  const int t = threadIdx.x & 3;
  const WideRowsOf rows(p.n, row);
  float bias[2];
  rows.bias(p.bias == nullptr ? nullptr : p.bias + int64_t{tile.matrix} * p.n, row, bias);
  float* y = p.y + row;
#pragma unroll
  for (int nb = 0; nb < kTokens / 8; ++nb) {
    const int column = 8 * nb + 2 * t;
    const float2 scale = *reinterpret_cast<const float2*>(places.scales + column);
    const int2 to = *reinterpret_cast<const int2*>(places.row_of + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + (i & 1) < tile.rows && rows.valid[i >> 1]) {
        y[((i & 1) == 0 ? to.x : to.y) * p.y_stride + 8 * (i >> 1)] =
            fmaf(sums[4 * nb + i], (i & 1) == 0 ? scale.x : scale.y, bias[i >> 1]);
      }
    }
  }
}

// Tiles of weights that arrive while one is multiplied. Narrow tiles of rows take less time than a request from L2.
template <DType kType>
inline constexpr int kSortedAhead = WeightTile<kType>::kLowWords < 16 ? 2 : 1;

template <DType kType>
__device__ __forceinline__ void sorted_multiply(const Problem& p, const SortedRows& format, const SortedShared& shared,
                                                const SortedJobs& jobs, uint32_t rank) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, group = threadIdx.x / 128;
  const int weight_tiles = static_cast<int>(format.weight_tiles()),
            tiles = half_passes(kType) == 2 ? static_cast<int>(format.k_tiles()) : weight_tiles;
  const auto stripe_of = [&](int job) {
    const int block = jobs.row_tile(job) * 2 + static_cast<int>(rank);
    return (p.gated() ? block * 4 : block * 8 + group * 4) + warp;
  };
  int job = blockIdx.x;
  if (job >= jobs.count) return;
  SortedTile tile = jobs.tile(job), tile_after = jobs.tile(job + gridDim.x);
  int stripe = stripe_of(job);
  const uint8_t* weights = sorted_stripe<kType>(p, tile, stripe, group);
  WideWeights<kType, kSortedAhead<kType>> arriving(weights, 0);
  uint32_t number = 0;
  for (uint32_t done = 0;; ++done) {
    const bool last = job + static_cast<int>(gridDim.x) >= jobs.count;
    const SortedTile tile_later = jobs.tile(job + 2 * gridDim.x);  // arrives during this job
    const int stripe_after = last ? stripe : stripe_of(job + gridDim.x);
    const uint8_t* after = last ? weights : sorted_stripe<kType>(p, tile_after, stripe_after, group);
    const WideRun run{WideRange(tiles, 0, 1), weights, after, 0, weight_tiles, tiles};
    const auto of_width = [&]<int kTokens>() __attribute__((always_inline)) {
      float sums[kTokens / 2] = {};
      wide_sums(shared.stages, run, number, arriving, sums);
      device::wait_at(shared.full(done), shared.parity(done));
      const SortedPlaces& places = shared.places[done % 2];
      const int row = stripe * kGpuRows + (lane >> 2);
      if (p.gated()) {
        sorted_store_gated<kTokens>(p, tile, places, row, group, sums, shared.exchange);
      } else {
        sorted_store_rows<kTokens>(p, tile, places, row, sums);
      }
    };
    switch (tile.width / kSortedUnit) {
      case 2:
        of_width.template operator()<64>();
        break;
      case 3:
        of_width.template operator()<96>();
        break;
      case 4:
        of_width.template operator()<128>();
        break;
      case 5:
        of_width.template operator()<160>();
        break;
      case 6:
        of_width.template operator()<192>();
        break;
      case 7:
        of_width.template operator()<224>();
        break;
      default:
        of_width.template operator()<256>();
        break;
    }
    __syncwarp();
    if (lane == 0) device::arrive_at(shared.empty(done));
    if (last) break;
    job += gridDim.x;
    tile = tile_after;
    tile_after = tile_later;
    stripe = stripe_after;
    weights = after;
  }
}
#endif  // DYNO_DEVICE_WGMMA

template <DType kType>
__global__ void __launch_bounds__(kSortedThreads, 1)
    gemm_sorted_kernel(const __grid_constant__ Problem p, const __grid_constant__ SortedRows format) {
#ifdef DYNO_DEVICE_WGMMA
  device::let_next_start();
  constexpr uint32_t kStagesBytes = kWideStages * kWideStageBytes;
  constexpr uint32_t kPlacesAt = kStagesBytes + kWideExchangeBytes, kBarriersAt = kPlacesAt + 2 * sizeof(SortedPlaces);
  extern __shared__ uint8_t shared_raw[];
  uint8_t* base = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const uint32_t address = device::shared_address(base);
  const SortedShared shared{{address, address + kBarriersAt + 32},
                            address + kBarriersAt,
                            reinterpret_cast<SortedPlaces*>(base + kPlacesAt),
                            reinterpret_cast<float4*>(base + kStagesBytes)};
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kWideStages; ++i) {
      device::barrier_init(shared.stages.full(i), 1);
      device::barrier_init(shared.stages.empty(i), 16);  // the multiplying warps of both blocks
    }
    for (uint32_t i = 0; i < 2; ++i) {
      device::barrier_init(shared.full(i), 1);
      device::barrier_init(shared.empty(i), 8);
    }
    device::barrier_init_fence();
  }
  device::cluster_sync();  // barriers are initialised in both blocks
  device::wait_for_previous();
  const uint32_t rank = device::cluster_rank();
  const SortedJobs jobs(p, format);
  if (threadIdx.x >= 256) {
    device::give_registers<40>();
    if (threadIdx.x == 256) sorted_fill(p, format, shared, jobs, rank);
    __syncwarp();  // the warp must be converged for the cluster barrier
  } else {
    device::take_registers<232>();
    sorted_multiply<kType>(p, format, shared, jobs, rank);
  }
  device::cluster_sync();  // no copy or arrival to the other block is pending
#endif
}

template <DType kType>
void gemm_sorted_of(const Problem& p, const SortedRows& format, int multiprocessors, CUstream_st* stream) {
  if constexpr (!group_built(KernelGroup::experts)) {
    throw_left_out(KernelGroup::experts);
  } else {
    const auto kernel = gemm_sorted_kernel<kType>;
    DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSortedShared));
    const unsigned clusters = multiprocessors < 2 ? 1 : static_cast<unsigned>(multiprocessors) / 2;
    launch_dependent_cluster("matmul_id", kernel, dim3(clusters, 2), kSortedThreads, Cluster(1, false, 2),
                             kSortedShared, stream, p, format);
  }
}

}  // namespace dyno::ops::cuda
