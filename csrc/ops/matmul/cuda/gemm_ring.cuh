// Dense products of few tokens (Hopper, code for 90a), which latencies bound rather than bytes. So both operands go
// through a ring in shared memory that the copy engine fills: as soon as a stage is free, one warp requests a chunk of
// k of all the block's rows of w, and the matching tiles of x. Weights do not depend on earlier launches, so the whole
// ring is requested while those still run. Blocks are small enough for two launches to fit on a multiprocessor.
//
// Eight warps multiply. Each takes two stripes of w (for a gated pair one of each matrix) and converts their codes to
// f16 in registers; wgmma multiplies them by x in shared memory. With 256 rows of w the two warpgroups have different
// rows; with 128 they share the tiles of a chunk. The blocks of a cluster share k. At the end each block adds the sums
// of all blocks for its share of the tokens, in the order of the blocks, so the bits do not depend on the number of
// multiprocessors. Several products of the same rows of x, all of one type, can be one launch: a block has rows of one
// of them.
#pragma once

#include "core/cuda/launch_cluster.h"
#include "device/bulk_copy.cuh"
#include "device/cluster_shared.cuh"
#include "device/dependent.cuh"
#include "device/wgmma.cuh"
#include "ops/matmul/cuda/gemm_ring.h"
#include "ops/matmul/cuda/gemm_ring_sums.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

inline constexpr int kGemmRingThreads = 32 * (kGemmRingWarps + 1);

#ifdef DYNO_DEVICE_WGMMA

// Per stage: weights have arrived, x has arrived, both have been read.
struct GemmRingBarriers {
  uint32_t at;

  __device__ __forceinline__ uint32_t weights(int stage) const { return at + stage * kGemmRingBarrierBytes; }
  __device__ __forceinline__ uint32_t x(int stage) const { return weights(stage) + 8; }
  __device__ __forceinline__ uint32_t read(int stage) const { return weights(stage) + 16; }

  // `stripes`: each arrives with a separate copy.
  __device__ __forceinline__ void init(int count, int stripes) const {
    for (int stage = 0; stage < count; ++stage) {
      device::barrier_init(weights(stage), stripes);
      device::barrier_init(x(stage), 1);
      device::barrier_init(read(stage), kGemmRingWarps);
    }
    device::barrier_init_done();
  }
};

// The chunks of k that a block multiplies.
struct GemmRingPart {
  int begin, count, tiles;  // tiles: over all of k

  template <DType kType>
  static __device__ __forceinline__ GemmRingPart of(int k, int rank, int parts) {
    constexpr int kTiles = gemm_ring_tiles(kType);
    const int tiles = (k + kGpuTile - 1) / kGpuTile, chunks = (tiles + kTiles - 1) / kTiles;
    const int begin = chunks * rank / parts;
    return {begin, chunks * (rank + 1) / parts - begin, tiles};
  }
  // Number of tiles in chunk `number` of the part.
  template <DType kType>
  __device__ __forceinline__ int there(int number) const {
    constexpr int kTiles = gemm_ring_tiles(kType);
    return min(tiles - (begin + number) * kTiles, kTiles);
  }
};

// Called by one warp: one lane per stripe of w, and lane 0 for x.
template <DType kType, int kTokens>
__device__ __forceinline__ void gemm_ring_fill(const Problem& p, const GemmRingProduct& product,
                                               const TiledRows& format, const GemmRingShape& shape,
                                               const GemmRingBarriers& barriers, const GemmRingPart& part, int matrix,
                                               uint32_t stages, int lane) {
  constexpr int kTiles = gemm_ring_tiles(kType);
  const int stripes = shape.rows / kGpuRows, of_w = (product.n + kGpuRows - 1) / kGpuRows;
  const int index = p.gated() ? (product.row_tile * stripes + lane) / 2 : product.row_tile * stripes + lane;
  const bool mine = lane < stripes && index < of_w;
  const uint8_t* w = (p.gated() && lane % 2 == 1 ? p.w_up : product.w) + matrix * p.w_stride +
                     index * gpu_stripe_bytes(kType, p.k) + int64_t{part.begin} * gemm_ring_chunk_bytes(kType);
  const uint64_t policy = device::evict_first_policy();
  const auto weights = [&](int number, int stage) {
    int bytes = gemm_ring_chunk_bytes(kType);
    if constexpr (!gpu_format(kType).super_block()) bytes = part.there<kType>(number) * gpu_format(kType).tile_bytes();
    if (mine) {
      device::bulk_copy(stages + stage * shape.stage_bytes + shape.x_bytes + lane * gemm_ring_chunk_bytes(kType),
                        w + int64_t{number} * gemm_ring_chunk_bytes(kType), bytes, barriers.weights(stage), policy);
    }
  };
  const uint8_t* x =
      p.x + ((matrix * format.token_tiles() + blockIdx.x) * part.tiles + part.begin * kTiles) * (kTokens * 128);
  const auto tiles_of_x = [&](int number, int stage) {
    if (lane == 0) {
      device::bulk_copy(stages + stage * shape.stage_bytes, x + int64_t{number} * shape.x_bytes,
                        part.there<kType>(number) * kTokens * 128, barriers.x(stage));
    }
  };
  const int first = min(part.count, shape.stages);
  for (int number = 0; number < first; ++number) weights(number, number);
  device::wait_for_previous();
  for (int number = 0; number < first; ++number) tiles_of_x(number, number);
  int stage = 0;
  uint32_t phase = 0;
  for (int number = first; number < part.count; ++number) {
    device::barrier_wait(barriers.read(stage), phase);
    weights(number, stage);
    tiles_of_x(number, stage);
    if (++stage == shape.stages) stage = 0, phase ^= 1;
  }
}

// Writes the sums of a warp's stripes for the other blocks of the cluster: [planes][kTokens][sums_stride].
template <int kTokens, int kStripes>
__device__ __forceinline__ void gemm_ring_put(const float (&sums)[kStripes][kTokens / 2], const GemmRingShape& shape,
                                              uint8_t* shared, int plane, int stripe, int lane) {
  const int g = lane >> 2, t = lane & 3;
  float* all = reinterpret_cast<float*>(shared) + plane * kTokens * shape.sums_stride + stripe * kGpuRows + g;
#pragma unroll
  for (int i = 0; i < kStripes; ++i) {
#pragma unroll
    for (int nb = 0; nb < kTokens / 8; ++nb) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        all[(8 * nb + 2 * t + e % 2) * shape.sums_stride + i * kGpuRows + 8 * (e / 2)] = sums[i][4 * nb + e];
      }
    }
  }
}

#endif  // DYNO_DEVICE_WGMMA

// kSeveral: p.more has further products.
template <DType kType, int kTokens, bool kSeveral>
__global__ void __launch_bounds__(kGemmRingThreads, kTokens == 64 ? 1 : 2)
    gemm_ring_kernel(const __grid_constant__ Problem p, const __grid_constant__ TiledRows format,
                     const __grid_constant__ GemmRingShape shape) {
#ifdef DYNO_DEVICE_WGMMA
  device::let_next_start();
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const uint32_t stages = device::shared_address(shared);
  const GemmRingBarriers barriers{stages + static_cast<uint32_t>(shape.barriers)};
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0);  // uniform within the warp
  const int rank = device::block_of_cluster(), matrix = p.first_matrix + static_cast<int>(blockIdx.z) / shape.parts;
  const auto part = GemmRingPart::of<kType>(p.k, rank, shape.parts);
  const auto product = GemmRingProduct::of<kSeveral>(p, shape.rows);
  if (threadIdx.x == 0) {
    const int pair = p.gated() ? 2 : 1, stripes = shape.rows / kGpuRows;
    const int left = ((product.n + kGpuRows - 1) / kGpuRows) * pair - product.row_tile * stripes;
    barriers.init(shape.stages, min(stripes, left));
  }
  __syncthreads();  // barriers are initialised
  if (warp == kGemmRingWarps) {
    gemm_ring_fill<kType, kTokens>(p, product, format, shape, barriers, part, matrix, stages, lane);
    device::cluster_arrive();
    device::cluster_wait();
  } else {
    constexpr int kTiles = gemm_ring_tiles(kType);
    // With 128 rows, each warpgroup has half of the tiles of a chunk.
    const bool halves = shape.rows == 128;
    const int stripe = (halves ? warp & 3 : warp) * 2;
    const int first = halves && warp >= 4 ? kTiles / 2 : 0, last = halves && warp < 4 ? kTiles / 2 : kTiles;
    float sums[2][kTokens / 2] = {};
    uint32_t a[2][2][4];  // [step & 1][stripe]: running products read one while the other is written
    int stage = 0;
    uint32_t phase = 0;
    for (int number = 0; number < part.count; ++number) {
      const uint8_t* codes = shared + stage * shape.stage_bytes + shape.x_bytes + stripe * gemm_ring_chunk_bytes(kType);
      const uint64_t x = device::wgmma_descriptor(stages + stage * shape.stage_bytes);
      const int end = min(last, part.there<kType>(number));
      device::barrier_wait(barriers.weights(stage), phase);
      device::barrier_wait(barriers.x(stage), phase);
#pragma unroll 1
      for (int tile = first; tile < end; ++tile) {
        WeightTile<kType> w[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) w[i].load_shared(codes + i * gemm_ring_chunk_bytes(kType), tile, lane);
        const uint64_t x_tile = x + static_cast<uint64_t>(tile * (kTokens * 128 >> 4));
        for_each_step([&]<int kStep>() {
          // At most the products of one step are running, so a[kStep & 1] is no longer read.
          w[0].template fragment<kStep>(a[kStep & 1][0]);
          w[1].template fragment<kStep>(a[kStep & 1][1]);
          device::wgmma_fence();
          device::wgmma_f16(sums[0], a[kStep & 1][0], x_tile + 2 * kStep);
          device::wgmma_f16(sums[1], a[kStep & 1][1], x_tile + 2 * kStep);
          device::wgmma_commit();
          device::wgmma_wait<1>();
        });
      }
      device::wgmma_wait<0>();
      __syncwarp();  // no lane reads the stage any longer
      if (lane == 0) device::barrier_arrive(barriers.read(stage));
      if (++stage == shape.stages) stage = 0, phase ^= 1;
    }
    device::named_sync(1, 32 * kGemmRingWarps);  // sums replace the stages
    gemm_ring_put<kTokens, 2>(sums, shape, shared, halves && warp >= 4 ? 1 : 0, stripe, lane);
    device::wait_for_previous();  // the epilogue reads scales and residual, and writes y
    const GemmRingEpilogue<kTokens, kSeveral> epilogue(p, product, format, shape, matrix, rank, stages, kGemmRingWarps);
    const GemmRingItem first_item = epilogue.load(threadIdx.x);
    device::cluster_arrive();
    device::cluster_wait();  // the sums of all blocks are written
    epilogue.finish(first_item);
  }
  device::cluster_arrive();
  device::cluster_wait();  // no block reads this block's shared memory any longer
#endif
}

using GemmRingKernel = void (*)(Problem, TiledRows, GemmRingShape);

inline void gemm_ring_start(GemmRingKernel kernel, int threads, const Problem& p, const TiledRows& format,
                            const GemmRingShape& shape, CUstream_st* stream) {
  DYNO_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.bytes)));
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));  // 16 blocks
  const int rows = p.gated() ? shape.rows / 2 : shape.rows;
  int row_tiles = (p.n + rows - 1) / rows;
  for (const Part& more : p.more) row_tiles += (more.n + rows - 1) / rows;
  const dim3 grid(static_cast<unsigned>(format.token_tiles()), static_cast<unsigned>(row_tiles),
                  static_cast<unsigned>((p.last_matrix - p.first_matrix) * shape.parts));
  const Cluster cluster(static_cast<unsigned>(shape.parts), shape.spread, static_cast<unsigned>(shape.joint()));
  launch_dependent_cluster("matmul", kernel, grid, static_cast<unsigned>(threads), cluster,
                           static_cast<size_t>(shape.bytes), stream, p, format, shape);
}

template <DType kType, int kTokens>
void gemm_ring_launch(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  const bool several = p.more[0].n > 0;
  gemm_ring_start(several ? gemm_ring_kernel<kType, kTokens, true> : gemm_ring_kernel<kType, kTokens, false>,
                  kGemmRingThreads, p, format, shape, stream);
}

template <DType kType>
void gemm_ring(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  switch (format.height) {
    case 16:
      return gemm_ring_launch<kType, 16>(p, format, shape, stream);
    case 32:
      return gemm_ring_launch<kType, 32>(p, format, shape, stream);
    case 64:
      return gemm_ring_launch<kType, 64>(p, format, shape, stream);
    default:
      throw_no_tile("wgmma_ring", shape.rows, format.height);
  }
}

}  // namespace dyno::ops::cuda
