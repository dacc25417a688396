// Dense products of few tokens (Hopper, code for 90a) with super-block weights, whose operands are integers
// (code_tile.cuh). Sums of one super-block of k have separate registers. After the super-block, they are multiplied by
// its factors and added to the total sums. The minima of a super-block are multiplied by the sums of x in one step of
// 16 (TiledRows::sums). Codes and scales of the next tile are loaded to registers while one is multiplied.
//
// As in gemm_ring.cuh, weights and x go through a ring in shared memory, and blocks of a cluster share k. But warps do
// not wait for each other: each has a separate ring for its stripes of w, and requests the next chunk as soon as it has
// read one. The last warp that reads a stage of x requests the next x for it. A block has eight warps with one or two
// stripes each, four warps for 64 rows of w, or sixteen warps for 512 rows, which read x half as often.
//
// Rows of x in HalfTiles have a scale per super-block, which multiplies the sums like the weights' factors. Products
// with the minima then have separate sums, or are added before the others begin.
#pragma once

#include "ops/matmul/cuda/code_tile.cuh"
#include "ops/matmul/cuda/codes_tiles.cuh"
#include "ops/matmul/cuda/gemm_ring.cuh"

namespace dyno::ops::cuda {

#ifdef DYNO_DEVICE_WGMMA

// Sums of a warp's stripes: rows of w by kTokens, in the order of wgmma's sums.
template <int kTokens, int kStripes>
using CodeSums = float[kStripes][kTokens / 2];

// A warp's view of the ring. Stages are adjacent; each has x first, then the stripes of all warps.
template <DType kType, int kTokens, int kStripes, CodesForm kForm>
struct CodeRing {
  static constexpr bool kScaled = kForm == CodesForm::from_tiles;
  static constexpr int kChunkBytes = gemm_ring_chunk_bytes(kType);
  static constexpr int kXBytes = kTokens * (kScaled ? HalfTiles::kRowBytes : kChunkTiles * 128 + 32);

  const GemmRingShape& shape;
  uint8_t* shared;
  uint32_t at;  // the same
  int warp, warps, chunks;
  int there = 0;        // number of existing stripes
  const uint8_t* w;     // chunk 0 of this block's part
  int64_t next_stripe;  // bytes between the first and the second stripe
  const uint8_t* x;

  __device__ __forceinline__ uint32_t barriers(int stage) const {
    return at + static_cast<uint32_t>(shape.barriers) + stage * (8 * warps + 16);
  }
  __device__ __forceinline__ uint32_t weights_barrier(int stage) const { return barriers(stage) + 16 + 8 * warp; }
  __device__ __forceinline__ uint32_t x_barrier(int stage) const { return barriers(stage); }
  __device__ __forceinline__ uint32_t readers(int stage) const { return barriers(stage) + 8; }
  __device__ __forceinline__ int codes_at(int stage) const {
    return stage * shape.stage_bytes + kXBytes + warp * kStripes * kChunkBytes;
  }

  // Called by one lane.
  __device__ __forceinline__ void ask_weights(int number, int stage, uint64_t policy) const {
    if (there == 0) return device::barrier_arrive(weights_barrier(stage));
    device::barrier_arrive_for_bytes(weights_barrier(stage), there * kChunkBytes);
    const uint8_t* from = w + int64_t{number} * kChunkBytes;
    device::bulk_copy_expected(at + codes_at(stage), from, kChunkBytes, weights_barrier(stage), policy);
    if (kStripes == 2 && there == 2) {
      device::bulk_copy_expected(at + codes_at(stage) + kChunkBytes, from + next_stripe, kChunkBytes,
                                 weights_barrier(stage), policy);
    }
  }
  __device__ __forceinline__ void ask_x(int number, int stage) const {
    device::bulk_copy(at + stage * shape.stage_bytes, x + int64_t{number} * kXBytes, kXBytes, x_barrier(stage));
  }
  // This warp has read chunk `number`: requests the next chunk for its stage. Called by one lane.
  __device__ __forceinline__ void done(int number, int stage, uint64_t policy) const {
    const int next = number + shape.stages;
    if (next >= chunks) return;
    ask_weights(next, stage, policy);
    // In order, because the copy must not overtake the reads of warps that counted earlier.
    if (device::count_up_to(readers(stage), warps - 1u) == warps - 1u) ask_x(next, stage);
  }
};

// Adds the sums of a super-block to the total sums. `unit`: of its stripes, for rows g and g + 8.
template <int kTokens, int kStripes>
__device__ __forceinline__ void add_super_block(CodeSums<kTokens, kStripes>& sums,
                                                const CodeSums<kTokens, kStripes>& block,
                                                const float (&unit)[kStripes][2]) {
#pragma unroll
  for (int i = 0; i < kStripes; ++i) {
#pragma unroll
    for (int e = 0; e < kTokens / 2; ++e) {
      sums[i][e] = fmaf(block[i][e], unit[i][e / 2 % 2], sums[i][e]);
    }
  }
}

// The scales of x in a super-block, for the tokens whose sums a lane has.
template <int kTokens>
__device__ __forceinline__ void load_scales(const uint8_t* x, int lane, float2 (&scales)[kTokens / 8]) {
  const auto* from = reinterpret_cast<const float2*>(x + HalfTiles::kScalesAt * kTokens) + lane % 4;
#pragma unroll
  for (int nb = 0; nb < kTokens / 8; ++nb) scales[nb] = from[4 * nb];
}

// As add_super_block(), for rows of x with a scale per super-block. kApart: `minima` are added before the scale.
template <bool kApart, int kTokens, int kStripes>
__device__ __forceinline__ void add_scaled(CodeSums<kTokens, kStripes>& sums, const CodeSums<kTokens, kStripes>& block,
                                           const CodeSums<kTokens, kStripes>& minima, const float (&unit)[kStripes][2],
                                           const float2 (&scales)[kTokens / 8]) {
#pragma unroll
  for (int i = 0; i < kStripes; ++i) {
#pragma unroll
    for (int e = 0; e < kTokens / 2; ++e) {
      float sum = block[i][e] * unit[i][e / 2 % 2];
      if constexpr (kApart) {
        sum = fmaf(block[i][e], unit[i][e / 2 % 2], minima[i][e]);
      }
      sums[i][e] = fmaf(sum, e % 2 == 0 ? scales[e / 4].x : scales[e / 4].y, sums[i][e]);
    }
  }
}

template <DType kType, int kTokens, int kStripes, CodesForm kForm>
__device__ __forceinline__ void gemm_codes_multiply(CodeSums<kTokens, kStripes>& sums,
                                                    const CodeRing<kType, kTokens, kStripes, kForm>& ring,
                                                    uint64_t policy, int lane) {
  using Tile = CodeTile<kType>;
  constexpr bool kScaled = kForm == CodesForm::from_tiles;
  // If registers allow it, products with the minima have separate sums in a super-block.
  constexpr bool kApart = kScaled && Tile::kMin && kTokens * kStripes <= 32;
  [[maybe_unused]] CodeSums<kTokens, kStripes> minima = {};
  constexpr int kChunkBytes = gemm_ring_chunk_bytes(kType);
  // Products of this many steps start together, because all warps of a warpgroup synchronise at each start.
  constexpr int kGroup = kStripes == 1 && kTokens < 64 ? 4 : 1;  // more would not fit into registers
  CodeSums<kTokens, kStripes> block = {};
  uint32_t a[2][kGroup][kStripes][4];  // running products read one while the other is written
  Tile w[2][kStripes];                 // [tile & 1]
  const uint32_t high_bytes = Tile::magic(ring.shape.rows, lane);
  // `begun`: whether `block` has sums of this super-block already.
  const auto start = [&]<int kPlace, int kFirst>(uint64_t x, bool begun) {
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kGroup; ++step) {
#pragma unroll
      for (int i = 0; i < kStripes; ++i) {
        device::wgmma_f16(block[i], a[kPlace][step][i], x + 2 * (kFirst + step), begun || kFirst + step > 0);
      }
    }
    device::wgmma_commit();
    // At most the last products are running, so the other buffer is no longer read.
    device::wgmma_wait<1>();
  };
  const auto multiply = [&]<int kTile>(const Tile(&tile)[kStripes], uint64_t x, bool begun) {
    for_each_step([&]<int kStep>() {
      constexpr int kPlace = kGroup == 1 ? kStep & 1 : kTile, kAt = kGroup == 1 ? 0 : kStep;
#pragma unroll
      for (int i = 0; i < kStripes; ++i) tile[i].template code_fragment<kStep>(a[kPlace][kAt][i], high_bytes);
      if constexpr (kAt == kGroup - 1) start.template operator()<kPlace, kStep - kAt>(x, begun);
    });
  };
  int stage = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int number = 0; number < ring.chunks; ++number) {
    const uint32_t x_at = ring.at + stage * ring.shape.stage_bytes;
    const uint8_t* units = ring.shared + ring.codes_at(stage);
    const auto load = [&](Tile(&tile)[kStripes], int index) {
#pragma unroll
      for (int i = 0; i < kStripes; ++i) tile[i].load_shared(units + i * kChunkBytes, index, lane);
    };
    device::barrier_wait(ring.weights_barrier(stage), phase);
    load(w[0], 0);
    if constexpr (Tile::kMin) {
#pragma unroll
      for (int i = 0; i < kStripes; ++i) code_minima<kType>(units + i * kChunkBytes, lane, a[1][0][i]);
    }
    device::barrier_wait(ring.x_barrier(stage), phase);
    if constexpr (Tile::kMin) {
      const uint64_t x_sums = device::wgmma_descriptor_plain(x_at + kChunkTiles * kTokens * 128);
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kStripes; ++i) {
        if constexpr (!kScaled) {
          device::wgmma_f16(sums[i], a[1][0][i], x_sums);
        } else if constexpr (kApart) {
          device::wgmma_f16(minima[i], a[1][0][i], x_sums, false);
        } else {
          device::wgmma_f16(block[i], a[1][0][i], x_sums, false);
        }
      }
      device::wgmma_commit();
      if constexpr (kScaled && !kApart) {
        float ones[kStripes][2];
#pragma unroll
        for (int i = 0; i < kStripes; ++i) ones[i][0] = ones[i][1] = 1.0f;
        float2 scales[kTokens / 8];
        load_scales<kTokens>(ring.shared + stage * ring.shape.stage_bytes, lane, scales);
        device::wgmma_wait<0>();
        add_scaled<false, kTokens, kStripes>(sums, block, minima, ones, scales);
      }
    }
    const uint64_t x = device::wgmma_descriptor(x_at);
    constexpr uint64_t kXTile = kTokens * 128 >> 4;
    // Without a loop where registers allow it.
#pragma unroll(kGroup == 1 ? 1 : kChunkTiles / 2)
    for (int tile = 0; tile < kChunkTiles; tile += 2) {
      load(w[1], tile + 1);
      multiply.template operator()<0>(w[0], x + tile * kXTile, tile > 0);
      if (tile == 0) load(w[0], tile + 2);
      multiply.template operator()<1>(w[1], x + (tile + 1) * kXTile, true);
    }
    float unit[kStripes][2];
#pragma unroll
    for (int i = 0; i < kStripes; ++i) {
      const __half2 d = code_factors<kType>(units + i * kChunkBytes, lane);
      unit[i][0] = __low2float(d) * Tile::unit_low(), unit[i][1] = __high2float(d) * Tile::unit_high();
    }
    [[maybe_unused]] float2 scales[kTokens / 8];
    if constexpr (kScaled) load_scales<kTokens>(ring.shared + stage * ring.shape.stage_bytes, lane, scales);
    device::wgmma_wait<0>();
    __syncwarp();  // no lane reads the stage any longer
    if (lane == 0) ring.done(number, stage, policy);
    if (++stage == ring.shape.stages) stage = 0, phase ^= 1;
    if constexpr (kScaled) {
      add_scaled<kApart, kTokens, kStripes>(sums, block, minima, unit, scales);
    } else {
      add_super_block<kTokens, kStripes>(sums, block, unit);
    }
  }
}

#endif  // DYNO_DEVICE_WGMMA

// kSeveral: p.more has further products.
template <DType kType, int kTokens, int kWarps, int kStripes, bool kSeveral, CodesForm kForm>
__global__ void __launch_bounds__(32 * kWarps, kTokens* kStripes > 64 || kWarps == 16 ? 1 : 16 / kWarps)
    gemm_codes_kernel(const __grid_constant__ Problem p, const __grid_constant__ TiledRows format,
                      const __grid_constant__ GemmRingShape shape) {
#ifdef DYNO_DEVICE_WGMMA
  device::let_next_start();
  using Ring = CodeRing<kType, kTokens, kStripes, kForm>;
  constexpr int kJoint = kForm == CodesForm::to_tiles ? 2 * HalfTiles::kBlock / (kGpuRows * kWarps * kStripes) : 1;
  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0);  // uniform within the warp
  const int rank = device::block_of_cluster() / kJoint;
  const int matrix = p.first_matrix + static_cast<int>(blockIdx.z) / shape.parts;
  const auto part = GemmRingPart::of<kType>(p.k, rank, shape.parts);
  const auto product = GemmRingProduct::of<kSeveral>(p, shape.rows);
  Ring ring{shape, shared, device::shared_address(shared), warp, kWarps, part.count};
  const int of_w = (product.n + kGpuRows - 1) / kGpuRows;
  const int stripe = (product.row_tile * kWarps + warp) * kStripes, index = p.gated() ? stripe / 2 : stripe;
  const int64_t stripe_bytes = gpu_stripe_bytes(kType, p.k);
  // The stripes of a gated pair alternate between both matrices.
  ring.w = (p.gated() && stripe % 2 == 1 ? p.w_up : product.w) + matrix * p.w_stride + index * stripe_bytes +
           int64_t{part.begin} * gemm_ring_chunk_bytes(kType);
  ring.next_stripe = p.gated() ? p.w_up - p.w : stripe_bytes;
  if (index < of_w) ring.there = p.gated() || index + 1 < of_w ? kStripes : 1;
  if constexpr (Ring::kScaled) {
    ring.x = p.x + (int64_t{blockIdx.x} * (part.tiles / kChunkTiles) + part.begin) * Ring::kXBytes;
  } else {
    ring.x = p.x + format.tile_at((matrix * format.token_tiles() + blockIdx.x) * part.tiles + part.begin * kChunkTiles);
  }
  const uint64_t policy = device::evict_first_policy();
  const int filled = min(part.count, shape.stages);
  if (lane == 0) {
    for (int stage = 0; stage < shape.stages; ++stage) {
      device::barrier_init(ring.weights_barrier(stage), 1);
      if (warp == 0) {
        device::barrier_init(ring.x_barrier(stage), 1);
        *reinterpret_cast<uint32_t*>(shared + (ring.readers(stage) - ring.at)) = 0;
      }
    }
    device::barrier_init_done();
    for (int number = 0; number < filled; ++number) ring.ask_weights(number, number, policy);
    if (warp == 0) {
      device::wait_for_previous();
      for (int number = 0; number < filled; ++number) ring.ask_x(number, number);
    }
  }
  __syncthreads();  // barriers are initialised
  CodeSums<kTokens, kStripes> sums = {};
  gemm_codes_multiply<kType, kTokens, kStripes, kForm>(sums, ring, policy, lane);
  __syncthreads();  // sums replace the stages
  gemm_ring_put<kTokens, kStripes>(sums, shape, shared, 0, warp * kStripes, lane);
  device::wait_for_previous();  // the epilogue reads scales and residual, and writes y
  if constexpr (kForm == CodesForm::to_tiles) {
    CodesTiles<kTokens, kWarps, kStripes>(p, format, shape, rank, ring.at).finish();
  } else {
    const GemmRingEpilogue<kTokens, kSeveral, Ring::kScaled> epilogue(p, product, format, shape, matrix, rank, ring.at,
                                                                      kWarps);
    const GemmRingItem first_item = epilogue.load(threadIdx.x);
    device::cluster_arrive_shared();
    device::cluster_wait();  // the sums of all blocks are written
    epilogue.finish(first_item);
    device::cluster_arrive_shared();
    device::cluster_wait();  // no block reads this block's shared memory any longer
  }
#endif
}

template <DType kType, int kTokens, int kWarps, int kStripes>
void gemm_codes_launch(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  constexpr CodesForm kRows = CodesForm::rows;
  gemm_ring_start(p.more[0].n > 0 ? gemm_codes_kernel<kType, kTokens, kWarps, kStripes, true, kRows>
                                  : gemm_codes_kernel<kType, kTokens, kWarps, kStripes, false, kRows>,
                  32 * kWarps, p, format, shape, stream);
}

template <DType kType, int kTokens>
void gemm_codes_of(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  if constexpr (has_small_blocks(kType)) {
    if (shape.rows == 64) {
      return gemm_ring_start(gemm_codes_kernel<kType, kTokens, 4, 1, false, CodesForm::rows>, 32 * 4, p, format, shape,
                             stream);
    }
  }
  if (shape.rows == 128) return gemm_codes_launch<kType, kTokens, 8, 1>(p, format, shape, stream);
  if (shape.rows == 256) return gemm_codes_launch<kType, kTokens, 8, 2>(p, format, shape, stream);
  if constexpr (kTokens < 64) {
    if (shape.rows == 512) return gemm_codes_launch<kType, kTokens, 16, 2>(p, format, shape, stream);
  }
  throw_no_tile("wgmma_codes", shape.rows, kTokens);
}

template <DType kType>
void gemm_codes(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  switch (format.height) {
    case 16:
      return gemm_codes_of<kType, 16>(p, format, shape, stream);
    case 32:
      return gemm_codes_of<kType, 32>(p, format, shape, stream);
    case 64:
      return gemm_codes_of<kType, 64>(p, format, shape, stream);
    default:
      throw_no_tile("wgmma_codes", shape.rows, format.height);
  }
}

// The same with x or y in HalfTiles.
template <DType kType, int kTokens, int kStripes>
void gemm_codes_tiles_launch(const Problem& p, const TiledRows& format, const GemmRingShape& shape,
                             CUstream_st* stream) {
  gemm_ring_start(shape.form == CodesForm::to_tiles
                      ? gemm_codes_kernel<kType, kTokens, 8, kStripes, false, CodesForm::to_tiles>
                      : gemm_codes_kernel<kType, kTokens, 8, kStripes, false, CodesForm::from_tiles>,
                  32 * kGemmRingWarps, p, format, shape, stream);
}

template <DType kType>
void gemm_codes_tiles(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  const auto start = [&]<int kTokens>() {
    if (shape.rows == 64 && shape.joint() == 1) {
      return gemm_ring_start(gemm_codes_kernel<kType, kTokens, 4, 1, false, CodesForm::from_tiles>, 32 * 4, p, format,
                             shape, stream);
    }
    if (shape.rows == 128) return gemm_codes_tiles_launch<kType, kTokens, 1>(p, format, shape, stream);
    if (shape.rows == 256) return gemm_codes_tiles_launch<kType, kTokens, 2>(p, format, shape, stream);
    throw_no_tile("wgmma_codes", shape.rows, kTokens);
  };
  switch (format.height) {
    case 16:
      return start.template operator()<16>();
    case 32:
      return start.template operator()<32>();
    case 64:
      return start.template operator()<64>();
    default:
      throw_no_tile("wgmma_codes", shape.rows, format.height);
  }
}

}  // namespace dyno::ops::cuda
