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
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/gemm_ring.h"
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
  int matrix, rank, threads, quads, share;
  uint32_t sums;
  // Whether four adjacent values of y, and of the residual, can be accessed at once: n is a multiple of four.
  bool quads_of_y;

  __device__ __forceinline__ GemmRingEpilogue(const Problem& problem, const GemmRingProduct& of,
                                              const TiledRows& format, const GemmRingShape& s, int of_matrix,
                                              int rank_of_block, uint32_t sums_at, int warps)
      : p(problem), product(of), shape(s), matrix(of_matrix), rank(rank_of_block), threads(32 * warps), sums(sums_at) {
    quads = p.gated() ? shape.rows / 8 : shape.rows / 4, share = kTokens / shape.parts;
    scales = reinterpret_cast<const float*>(p.x + format.scales_at()) +
             (matrix * format.token_tiles() + blockIdx.x) * kTokens;
    quads_of_y = (reinterpret_cast<uint64_t>(product.y) | reinterpret_cast<uint64_t>(p.residual) |
                  static_cast<uint64_t>((product.y_stride | p.y_batch_stride) * 4)) %
                     16 ==
                 0;
  }
  __device__ __forceinline__ int items() const { return share * quads; }

  __device__ __forceinline__ GemmRingItem load(int number) const {
    GemmRingItem item;
    const bool gated = p.gated();
    const int first = blockIdx.x * kTokens, column = rank * share + number / quads, quad = number % quads;
    const int row = (product.row_tile * quads + quad) * 4;
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
