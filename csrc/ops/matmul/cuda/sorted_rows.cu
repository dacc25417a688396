// Sorts rows by expert, and converts them to the tiles of their places.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch_cluster.h"
#include "device/cluster_shared.cuh"
#include "device/dependent.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "device/row_scale.cuh"
#include "ops/matmul/cuda/sorted.h"
#include "ops/matmul/cuda/wide_chunk.cuh"

namespace dyno::ops::cuda {
namespace {

constexpr int kSortBlocks = 8, kSortWarps = 16;  // a cluster
constexpr int kSortThreads = 32 * kSortWarps;
constexpr int kIdsAtOnce = 8;  // of a lane, because loads cannot pass atomic operations

// Shared memory of a block: counts of each warp, then of the block, then first places.
constexpr int sort_shared_bytes(int64_t matrices) { return (kSortWarps + 2) * static_cast<int>(matrices) * 4; }

#if __CUDA_ARCH__ >= 900
// Calls use(first row, ids) for each 256 rows of a warp's section; row i of a lane is first + 32·i + lane.
template <typename Use>
__device__ __forceinline__ void for_each_ids(const int32_t* ids, int begin, int end, const Use& use) {
  for (int first = begin; first < end; first += 32 * kIdsAtOnce) {
    int32_t taken[kIdsAtOnce];
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const int row = first + 32 * i + static_cast<int>(threadIdx.x & 31);
      taken[i] = row < end ? ids[row] : -1;
    }
    use(first, taken);
  }
}

// Writes the first place of each expert to shared memory; `totals` has the rows of each expert. One warp.
__device__ __forceinline__ void place_experts(const int32_t* totals, int matrices, int32_t* first_places) {
  const int lane = threadIdx.x & 31;
  int base = 0;
  for (int first = 0; first < matrices; first += 32) {
    const int expert = first + lane, places = expert < matrices ? (totals[expert] + 7) / 8 * 8 : 0;
    int end = places;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(device::kFullMask, end, offset);
      if (lane >= offset) end += before;
    }
    if (expert < matrices) first_places[expert] = base + end - places;
    base += __shfl_sync(device::kFullMask, end, 31);
  }
}
#endif

// A cluster of blocks; each warp has a section of the rows, in order. Counts of all warps before give the next place of
// each expert, so places have the order of rows.
__global__ void __launch_bounds__(kSortThreads)
    sort_rows_kernel(const __grid_constant__ Problem p, const __grid_constant__ SortedRows format, uint8_t* out) {
#if __CUDA_ARCH__ >= 900
  device::let_next_start();
  extern __shared__ int32_t shared[];
  const int matrices = p.matrices, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int rank = device::block_of_cluster();
  int32_t* counts = shared;  // [warp][expert]
  int32_t* totals = shared + kSortWarps * matrices;
  int32_t* first_places = totals + matrices;
  for (int i = threadIdx.x; i < kSortWarps * matrices; i += kSortThreads) counts[i] = 0;
  device::wait_for_previous();
  __syncthreads();  // counts are zero
  constexpr int kSections = kSortBlocks * kSortWarps;
  const int section = rank * kSortWarps + warp;
  const int begin = static_cast<int>(int64_t{p.rows} * section / kSections);
  const int end = static_cast<int>(int64_t{p.rows} * (section + 1) / kSections);
  int32_t* mine = counts + warp * matrices;
  for_each_ids(p.ids, begin, end, [&](int, const int32_t(&ids)[kIdsAtOnce]) {
#pragma unroll
    for (const int32_t id : ids) {
      if (id >= 0) atomicAdd(&mine[id], 1);
    }
  });
  __syncthreads();  // all warps have counted
  for (int expert = threadIdx.x; expert < matrices; expert += kSortThreads) {
    int before = 0;
    for (int w = 0; w < kSortWarps; ++w) {
      const int count = counts[w * matrices + expert];
      counts[w * matrices + expert] = before;
      before += count;
    }
    totals[expert] = before;
  }
  device::cluster_arrive();
  device::cluster_wait();  // the totals of all blocks are there
  const uint32_t totals_at = device::shared_address(totals);
  for (int expert = threadIdx.x; expert < matrices; expert += kSortThreads) {
    int before = 0, all = 0;
#pragma unroll
    for (int block = 0; block < kSortBlocks; ++block) {
      const auto at = device::cluster_address(totals_at + static_cast<uint32_t>(expert) * 4, block);
      const int count = __float_as_int(device::load_cluster_float(at));
      before += block < rank ? count : 0;
      all += count;
    }
    for (int w = 0; w < kSortWarps; ++w) counts[w * matrices + expert] += before;
    first_places[expert] = all;
  }
  device::cluster_arrive();
  device::cluster_wait();  // no block reads the totals of another any longer
  for (int expert = threadIdx.x; expert < matrices; expert += kSortThreads) totals[expert] = first_places[expert];
  __syncthreads();  // the totals of the cluster are there
  if (warp == 0) place_experts(totals, matrices, first_places);
  __syncthreads();  // first places are known
  if (rank == 0) {
    auto* experts = reinterpret_cast<SortedExpert*>(out + format.experts_at());
    for (int i = threadIdx.x; i < matrices; i += kSortThreads) experts[i] = {first_places[i], totals[i]};
  }
  auto* place_of = reinterpret_cast<int32_t*>(out + format.place_of_at());
  auto* row_of = reinterpret_cast<int32_t*>(out + format.row_of_at());
  for_each_ids(p.ids, begin, end, [&](int first, const int32_t(&ids)[kIdsAtOnce]) {
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const int row = first + 32 * i + lane;
      const int32_t id = ids[i];
      const unsigned alike = __match_any_sync(device::kFullMask, id);
      const int before = __popc(alike & ((1u << lane) - 1u));
      const int place = id >= 0 ? first_places[id] + mine[id] + before : -1;
      __syncwarp();  // counts are read
      if (id >= 0 && before == 0) mine[id] += __popc(alike);
      __syncwarp();  // counts are written
      if (row >= end) continue;
      place_of[row] = place;
      if (place >= 0) row_of[place] = row;
    }
  });
#endif
}

// Calls use(expert, tiling, count, number) for each expert, with the count of its tiles of this many units and the
// number of those of the experts before. Returns the number of all. One warp; lanes have experts.
template <typename Use>
__device__ __forceinline__ int for_each_tiling(const SortedExpert* experts, int matrices, int units, const Use& use) {
  const int lane = threadIdx.x & 31;
  int base = 0;
  for (int first = 0; first < matrices; first += 32) {
    const int expert = first + lane;
    const SortedTiling tiling(expert < matrices ? experts[expert].rows : 0);
    const int count = tiling.count(units);
    int end = count;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(device::kFullMask, end, offset);
      if (lane >= offset) end += before;
    }
    use(expert, tiling, count, base + end - count);
    base += __shfl_sync(device::kFullMask, end, 31);
  }
  return base;
}

// Writes the list of tiles, widest first, and among equal ones in the order of experts. One block; each warp has some
// widths.
__device__ __forceinline__ void list_tiles(const SortedRows& format, uint8_t* out) {
  __shared__ int counts[kSortedMost + 1];  // by units
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const auto* experts = reinterpret_cast<const SortedExpert*>(out + format.experts_at());
  auto* list = reinterpret_cast<SortedTile*>(out + format.list_at()) + 1;
  const int matrices = static_cast<int>(format.matrices);
  for (int units = kSortedLeast + warp; units <= kSortedMost; units += warps) {
    const int count = for_each_tiling(experts, matrices, units, [](int, const SortedTiling&, int, int) {});
    if (threadIdx.x % 32 == 0) counts[units] = count;
  }
  __syncthreads();  // the numbers of all widths are known
  for (int units = kSortedLeast + warp; units <= kSortedMost; units += warps) {
    int base = 0;
    for (int wider = units + 1; wider <= kSortedMost; ++wider) base += counts[wider];
    for_each_tiling(experts, matrices, units, [&](int expert, const SortedTiling& tiling, int count, int number) {
      if (count == 0) return;
      const SortedExpert of = experts[expert];
      const int begin = units == tiling.units ? tiling.longer : 0, width = units * kSortedUnit;
      for (int i = 0; i < count; ++i) {
        const int at = tiling.first_unit(begin + i) * kSortedUnit;
        list[base + number + i] = {expert, of.first_place + at, width, min(width, of.rows - at)};
      }
    });
    if (units == kSortedLeast && threadIdx.x % 32 == 0) list[-1] = {base + counts[units], 0, 0, 0};
  }
}

// The first block writes the list of tiles; each other block converts a row of x. A thread keeps kTileKept chunks
// between the search for the maximum and the scaling.
constexpr int kTileKept = 2, kTileThreads = 1024;
__global__ void __launch_bounds__(kTileThreads)
    tile_sorted_rows_kernel(const __grid_constant__ Problem p, const __grid_constant__ SortedRows format, bool quads,
                            uint8_t* out) {
  constexpr int kSlots = 32;
  const int threads = static_cast<int>(blockDim.x);
  __shared__ float shared[32];
  __shared__ int32_t places[kSlots];
  device::let_next_start();
  device::wait_for_previous();
  if (blockIdx.x == 0) return list_tiles(format, out);
  const int64_t x_row = static_cast<int64_t>(blockIdx.x) - 1;
  const auto* place_of = reinterpret_cast<const int32_t*>(out + format.place_of_at()) + x_row * p.x_divisor;
  if (static_cast<int>(threadIdx.x) < min(p.x_divisor, kSlots)) places[threadIdx.x] = place_of[threadIdx.x];
  const float* row = reinterpret_cast<const float*>(p.x + x_row * p.x_stride);
  const int weight_tiles = static_cast<int>(format.weight_tiles()), chunks = weight_tiles * 8;
  Chunk kept[kTileKept];
  float most = 0;
#pragma unroll
  for (int i = 0; i < kTileKept; ++i) {
    kept[i] = Chunk(row, 8 * (static_cast<int>(threadIdx.x) + i * threads), p.k, quads);
    most = kept[i].largest(most);
  }
  for (int c = static_cast<int>(threadIdx.x) + kTileKept * threads; c < chunks; c += threads) {
    most = Chunk(row, 8 * c, p.k, quads).largest(most);
  }
  most = device::block_max(most, shared);  // places are there as well
  const float scale = device::row_scale(most), inverse = device::inverse_scale(scale);
  const int64_t tile_bytes = format.tile_bytes();
  for (int slot = 0; slot < p.x_divisor; ++slot) {
    const int place = slot < kSlots ? places[slot] : place_of[slot];
    if (place < 0) {
      float* y = p.y + (x_row * p.x_divisor + slot) * p.y_stride;
      for (int i = static_cast<int>(threadIdx.x); i < p.n; i += threads) y[i] = 0;
      continue;
    }
    uint8_t* tiles = out + int64_t{place} * 128;
    uint8_t* rests = format.passes == 2 ? tiles + weight_tiles * tile_bytes : nullptr;
    const auto put = [&](const Chunk& chunk, int c) {
      const int64_t at = c / 8 * tile_bytes + ((c % 8 ^ (place & 7)) << 4);
      chunk.put(inverse, tiles + at, rests == nullptr ? nullptr : rests + at);
    };
#pragma unroll
    for (int i = 0; i < kTileKept; ++i) {
      const int c = static_cast<int>(threadIdx.x) + i * threads;
      if (c < chunks) put(kept[i], c);
    }
    for (int c = static_cast<int>(threadIdx.x) + kTileKept * threads; c < chunks; c += threads)
      put(Chunk(row, 8 * c, p.k, quads), c);
    if (threadIdx.x == 0) reinterpret_cast<float*>(out + format.scales_at())[place] = scale;
  }
}

}  // namespace

void sort_rows(const Problem& p, const SortedRows& format, uint8_t* out, CUstream_st* stream) {
  const int bytes = sort_shared_bytes(p.matrices);
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(sort_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  launch_dependent_cluster("matmul_id", sort_rows_kernel, dim3(1, kSortBlocks), kSortThreads,
                           Cluster(1, false, kSortBlocks), static_cast<size_t>(bytes), stream, p, format, out);
}

void tile_sorted_rows(const Problem& p, const SortedRows& format, uint8_t* out, CUstream_st* stream) {
  const bool quads = (reinterpret_cast<uintptr_t>(p.x) | static_cast<uintptr_t>(p.x_stride)) % 16 == 0;
  const int64_t chunks = format.weight_tiles() * 8;
  const auto threads =
      static_cast<unsigned>(std::clamp<int64_t>((chunks / kTileKept + 31) / 32 * 32, 64, kTileThreads));
  launch_dependent("matmul_id", tile_sorted_rows_kernel, dim3(static_cast<unsigned>(1 + format.rows / p.x_divisor)),
                   threads, 0, stream, p, format, quads, out);
}

}  // namespace dyno::ops::cuda
