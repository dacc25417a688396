// Attention over latents (MLA, absorbed) by clusters of eight blocks, for few tokens, optimised for latency. A block
// has 16 query rows and a share of the keys, 32 per step, which are in shared memory once for both products. In
//   scores[16 rows, 32 keys] = Q · Kᵀ
// each of eight warps computes the part of every eighth 16 dimensions, for which it keeps the queries in registers; in
//   out[16 rows, 512 dims] += P · V
// it computes 64 dimensions. The order of the summed index is free, so lane 4·g + t has the contiguous dimensions 16·c
// + 4·t … + 3 of queries and keys. The sums of the blocks are combined in shared memory of the cluster
// (cluster_combine.cuh). A launch of its own adds the results of several clusters (add_parts.cuh).
//
// Rows of a float32 cache are stored in shared memory as floats. Their fragments are split into f16 pairs just before
// the tensor cores, and so are the scaled queries (latent.cuh). Each number is read once for the scores and once for
// the output, so f16 pairs in shared memory would save no reads and cost an additional pass.
//
// kFused: the rotary part of the queries comes unrotated from a separate input, and the latents of new tokens are
// inputs before norm, rotation and store (fresh.cuh).
#pragma once

#include <cuda_runtime.h>

#include "device/dependent.cuh"
#include "device/flash.cuh"
#include "device/half_pairs.cuh"
#include "ops/attention/cluster_combine.cuh"

namespace dyno::ops::latent_cluster {

using device::Scalar;
using direct::kLog2E;
using direct::Rows;

inline constexpr int kWarps = 8;
inline constexpr int kRows = kLatentRows;
inline constexpr int kChunksOfWarp = (kLatentMaxKey / 16 + kWarps - 1) / kWarps;
inline constexpr int kScorePitch = kClusterKeys + 8;

// Element: float, or uint16_t for f16 and bf16.
template <typename Element>
struct Memory {
  static constexpr int kPitch = kLatentMaxKey + kLatentPadBytes / static_cast<int>(sizeof(Element));
  // Spreads the writes of a quarter of a warp (floats: 16 bytes per lane), or of half of it, over all banks.
  static constexpr int kResultPitch = kLatentMaxValue + (sizeof(Element) == 4 ? 4 : 8);
  Element rows[kClusterStages][kClusterKeys][kPitch];  // at the end: float [kRows][kResultPitch]
  float scores[kWarps][kRows][kScorePitch];            // earlier: the new rows as floats, per warp
  clustered::Sent<kRows> sent;
  uint16_t weights[kRows][kScorePitch];
};
template <typename Element>
struct FusedMemory : Memory<Element> {
  Element fresh[kFusedAttentionTokens][Memory<Element>::kPitch];
  float2 angles[kFusedAttentionTokens * kLatentMaxRotary / 2];
};
template <typename Element>
constexpr bool fits(DType type) {
  return sizeof(Memory<Element>) <= latent_cluster_shared_bytes(type, false) &&
         sizeof(FusedMemory<Element>) <= latent_cluster_shared_bytes(type, true) &&
         sizeof(float) * kRows * Memory<Element>::kResultPitch <= sizeof(Memory<Element>::rows);
}
static_assert(fits<float>(DType::f32) && fits<uint16_t>(DType::f16));
static_assert(kLatentMaxKey <= kRows * kScorePitch);

struct LatentTask {
  DirectTask direct;
  bool vector;  // queries can be read in units of 16 bytes
};

__device__ __forceinline__ float4 load_floats(const float* p, bool vector) {
  if (vector) return *reinterpret_cast<const float4*>(p);
  return make_float4(p[0], p[1], p[2], p[3]);
}

// The keys of block `index` of a tile. One cluster is used until its blocks have more than one step.
__device__ __forceinline__ KeyRange block_keys(const CudaAttention& t, const CudaTile& tile, int index) {
  const int keys = tile.key_end - tile.key_begin;
  const int wanted = (keys + kClusterBlocks * kClusterKeys - 1) / (kClusterBlocks * kClusterKeys);
  const int blocks = min(wanted, t.splits) * kClusterBlocks;
  const int each = ((keys + blocks - 1) / blocks + 15) / 16 * 16;
  const int begin = tile.key_begin + index * each;
  return {begin, min(begin + each, tile.key_end), (keys + each - 1) / each};
}

// The parts of a tile, one of each cluster.
struct ClusterParts {
  static __device__ int of(const CudaAttention& t, const CudaTile& tile) {
    return (block_keys(t, tile, 0).active + kClusterBlocks - 1) / kClusterBlocks;
  }
};

// Dimensions [dim, dim + 4) of the row of rotary dimensions at `row`, rotated.
__device__ __forceinline__ float4 rotate(const FreshRows& f, const float* row, int dim, const float2* angles,
                                         bool vector) {
  const float4 x = load_floats(row + dim, vector);
  if (!f.neox) {
    const float2 a = angles[dim / 2], b = angles[dim / 2 + 1];
    return make_float4(x.x * a.x - x.y * a.y, x.x * a.y + x.y * a.x, x.z * b.x - x.w * b.y, x.z * b.y + x.w * b.x);
  }
  const int half = f.n_rot / 2, pair = dim < half ? dim : dim - half;
  const float4 y = load_floats(row + (dim < half ? dim + half : dim - half), vector);
  const float sign = dim < half ? -1.0f : 1.0f;
  const float2 a = angles[pair], b = angles[pair + 1], c = angles[pair + 2], d = angles[pair + 3];
  return make_float4(x.x * a.x + sign * y.x * a.y, x.y * b.x + sign * y.y * b.y, x.z * c.x + sign * y.z * c.y,
                     x.w * d.x + sign * y.w * d.y);
}

// Norm, rotation and store of a new token's latent, to the cache and shared memory, by one warp.
template <Scalar kType, typename Element>
struct FreshLatents {
  static constexpr int kPer = kLatentMaxKey / 32;
  const CudaAttention& t;
  const FreshRows& f;
  const CudaTile& tile;
  const FreshKeys& fresh;
  FusedMemory<Element>& memory;
  int lane, warp;
  float weight[kPer];

  __device__ bool works() const { return warp < fresh.count; }
  __device__ void prepare() {
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int i = lane + 32 * j;
      weight[j] = works() && f.k_norm != nullptr && i < t.dk - f.n_rot ? f.k_norm[i] : 1.0f;
    }
  }
  __device__ void load(float (&x)[kPer]) const {
    const float* from = f.k + (tile.run.first_token + fresh.first + warp) * f.k_stride;
#pragma unroll
    for (int j = 0; j < kPer; ++j) x[j] = lane + 32 * j < t.dk ? from[lane + 32 * j] : 0.0f;
  }
  __device__ void finish(float (&x)[kPer]) {
    const int rest = t.dk - f.n_rot, token = fresh.first + warp;
    if (f.norms_k) {
      const float scale = norm_scale(x, rest, f.eps, lane);
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        if (lane + 32 * j < rest) x[j] = x[j] * scale * weight[j];
      }
    }
    float* row = memory.scores[warp][0];
#pragma unroll
    for (int j = 0; j < kPer; ++j) row[lane + 32 * j] = x[j];
    __syncwarp();  // the row is written; the elements of a pair are in different lanes
    rotate_row(f, row + rest, memory.angles + token * (f.n_rot / 2), lane);
    __syncwarp();  // the pairs are rotated
    auto* shared = reinterpret_cast<uint8_t*>(memory.fresh[warp]);
    uint8_t* cache = f.k_cache + fresh_cell(t, tile, token) * t.args.k_row_bytes;
    const bool write = stores(t, tile, token);
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int i = lane + 32 * j;
      const float v = i < t.dk ? row[i] : 0.0f;
      device::store_scalar(kType, v, shared, i, lane);
      if (write && i < t.dk) device::store_scalar(kType, v, cache, i, lane);
    }
  }
};

__device__ __forceinline__ uint32_t split_pair(float a, float b, uint32_t& rest) {
  return device::split_pair(a, b, 1.0f, rest);
}

template <Scalar kType, bool kFused>
__global__ void __launch_bounds__(32 * kWarps, 1) latent_cluster_kernel(const __grid_constant__ LatentTask task) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kBf16 = kType == Scalar::bf16, kTwice = kType == Scalar::f32;
  using Element = std::conditional_t<kTwice, float, uint16_t>;
  constexpr int kOfPiece = 16 / static_cast<int>(sizeof(Element)), kResultPitch = Memory<Element>::kResultPitch;
  extern __shared__ __align__(16) uint8_t raw[];
  __shared__ float shrinks[kRows];
  __shared__ float2 stats[kRows];
  auto& memory = *reinterpret_cast<Memory<Element>*>(raw);
  auto& fused_memory = *reinterpret_cast<FusedMemory<Element>*>(raw);
  device::let_next_start();
  const CudaAttention& t = task.direct.common;
  const FreshRows& f = task.direct.fresh;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, quad = lane % 4;
  const int kv_head = blockIdx.y, cluster = blockIdx.z / kClusterBlocks;
  // Asked for before the run is known, because each takes the latency of a load.
  const int pairs = kFused ? f.n_rot / 2 : 1;
  const float frequency = kFused ? f.inv_freq[static_cast<int>(threadIdx.x) % pairs] : 0.0f;
  const CudaTile tile = find_tile(t, blockIdx.x, kRows);
  const KeyRange range = block_keys(t, tile, blockIdx.z);
  // A cluster without work exits as a whole.
  if (tile.empty() || cluster * kClusterBlocks >= range.active) return;
  clustered::expect(memory.sent, clustered::members_of(cluster, range.active));

  const uint8_t* base = key_rows(t, tile.run, kv_head);
  const int chunks = (t.dk + 15) / 16, pieces = chunks * 16 / kOfPiece;  // per row
  const FreshKeys fresh(tile, range);
  const int fresh_begin = tile.run.position + fresh.first;
  // Loads keys [first, first + 32) to a stage; rows up to the next multiple of 16 and the rest of the last 16
  // dimensions are zeros.
  const auto load_keys = [&](int first, int stage, Rows which) {
    const int rows = min((range.end - first + 15) / 16 * 16, kClusterKeys);
    for (int r = warp; r < rows; r += kWarps) {
      const int key = first + r;
      const bool is_fresh = key >= fresh_begin && key < range.end;
      if (which != Rows::all && is_fresh != (which == Rows::fresh)) continue;
      const bool valid = key < range.end && !(kFused && is_fresh);
      const uint8_t* row = base + key * t.args.k_row_bytes;
      for (int piece = lane; piece < pieces; piece += 32) {
        const bool inside = valid && kOfPiece * piece < t.dk;
        Element* to = &memory.rows[stage][r][kOfPiece * piece];
        if (task.direct.aligned) {
          device::copy_async_16(device::shared_address(to), inside ? row + 16 * piece : base, inside);
        } else {
          *reinterpret_cast<uint4*>(to) = inside ? direct::load_16(row + 16 * piece, false) : uint4{0, 0, 0, 0};
        }
      }
    }
  };
  if (task.direct.early) load_keys(range.begin, 0, Rows::settled);
  FreshLatents<kType, Element> latents{t, f, tile, fresh, fused_memory, lane, warp};
  if constexpr (kFused) {
    latents.prepare();
    for (int i = static_cast<int>(threadIdx.x); i < tile_tokens(t, tile) * pairs; i += 32 * kWarps) {
      const float of_pair = 32 * kWarps % pairs == 0 ? frequency : f.inv_freq[i % pairs];
      fused_memory.angles[i] = device::cos_sin(tile.run.position + i / pairs, of_pair, f.mscale);
    }
    __syncthreads();  // the angles are written
  }
  device::wait_for_previous();
  if (!task.direct.early) load_keys(range.begin, 0, Rows::settled);
  load_keys(range.begin, 0, Rows::fresh);
  device::copy_async_commit();
  load_keys(range.begin + kClusterKeys, 1, Rows::all);
  device::copy_async_commit();

  // Scaled queries: of rows g and g + 8, every eighth 16 dimensions.
  float latent[FreshLatents<kType, Element>::kPer];
  if (kFused && latents.works()) latents.load(latent);
  uint32_t query[kChunksOfWarp][4], query_rest[kTwice ? kChunksOfWarp : 1][4];
  {
    const float scale = t.query_scale();
    const int rest = kFused ? t.dk - f.n_rot : t.dk;
    const float* from[2];
    const float* rotary[2];
    const float2* angles[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(tile.row_begin + g + 8 * h, tile.row_end - 1);  // a row past the end is not written
      from[h] = query_row(t, tile, row, kv_head);
      if constexpr (kFused) {
        const int token = row / t.group, head = kv_head * t.group + row % t.group;
        rotary[h] = f.q_rotary + (tile.run.first_token + token) * f.q_rotary_stride + head * f.q_rotary_head;
        angles[h] = fused_memory.angles + token * (f.n_rot / 2);
      }
    }
    float4 x[kChunksOfWarp][2];
#pragma unroll
    for (int j = 0; j < kChunksOfWarp; ++j) {
      const int dim = 16 * (warp + kWarps * j) + 4 * quad;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        x[j][h] = dim < rest ? load_floats(from[h] + dim, task.vector) : make_float4(0, 0, 0, 0);
      }
    }
    if constexpr (kFused) {
#pragma unroll
      for (int j = 0; j < kChunksOfWarp; ++j) {
        const int dim = 16 * (warp + kWarps * j) + 4 * quad;
        if (dim < rest || dim >= t.dk) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) x[j][h] = rotate(f, rotary[h], dim - rest, angles[h], task.vector);
      }
    }
#pragma unroll
    for (int j = 0; j < kChunksOfWarp; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 v = make_float4(x[j][h].x * scale, x[j][h].y * scale, x[j][h].z * scale, x[j][h].w * scale);
        if constexpr (kTwice) {
          query[j][h] = split_pair(v.x, v.y, query_rest[j][h]);
          query[j][2 + h] = split_pair(v.z, v.w, query_rest[j][2 + h]);
        } else {
          query[j][h] = device::pack2_finite<kBf16>(v.x, v.y);
          query[j][2 + h] = device::pack2_finite<kBf16>(v.z, v.w);
        }
      }
    }
  }
  if (kFused && latents.works()) latents.finish(latent);

  // In the softmax, thread 16·row + i has keys 2·i and 2·i + 1.
  const int row = static_cast<int>(threadIdx.x) / 16, pair = static_cast<int>(threadIdx.x) % 16;
  const int position = tile.run.position + min(tile.row_begin + row, tile.row_end - 1) / t.group;
  float best = minus_infinity(), total = 0;
  // Dimensions 64·warp + 8·i; for floats, column c of tile 4·b + j has dimension 64·warp + 32·b + 4·c + j.
  float out[8][4] = {};
  // The key whose scores are column g of a tile of 8; for floats, two adjacent columns are in different banks.
  const int column_key = kTwice ? g / 2 + g % 2 * 4 : g;

  int stage = 0;
  for (int first = range.begin; first < range.end; first += kClusterKeys, stage ^= 1) {
    const int keys = min(range.end - first, kClusterKeys);
    device::copy_async_wait<1>();
    __syncthreads();  // the keys of this step have arrived
    if (kFused && first + keys > fresh_begin) {
      for (int r = warp; r < fresh.count; r += kWarps) {
        const int to = fresh_begin + r - first;
        if (to < 0 || to >= keys) continue;
        for (int piece = lane; piece < pieces; piece += 32) {
          *reinterpret_cast<uint4*>(&memory.rows[stage][to][kOfPiece * piece]) =
              *reinterpret_cast<const uint4*>(&fused_memory.fresh[r][kOfPiece * piece]);
        }
      }
      __syncthreads();  // … and so have the new ones
    }
    float part[kClusterKeys / 8][4] = {}, part_rest[kTwice ? kClusterKeys / 8 : 1][4] = {};
#pragma unroll
    for (int j = 0; j < kChunksOfWarp; ++j) {
      const int chunk = warp + kWarps * j;
      if (chunk >= chunks) break;
#pragma unroll
      for (int n = 0; n < kClusterKeys / 8; ++n) {
        if (8 * n >= keys) break;
        const Element* at = &memory.rows[stage][8 * n + column_key][16 * chunk + 4 * quad];
        if constexpr (kTwice) {
          const float4 k = *reinterpret_cast<const float4*>(at);
          uint32_t rest[2];
          const uint32_t half[2] = {split_pair(k.x, k.y, rest[0]), split_pair(k.z, k.w, rest[1])};
          direct::mma<false>(part[n], query[j], half[0], half[1]);
          direct::mma<false>(part_rest[n], query[j], rest[0], rest[1]);
          direct::mma<false>(part_rest[n], query_rest[j], half[0], half[1]);
        } else {
          const uint2 k = *reinterpret_cast<const uint2*>(at);
          direct::mma<kBf16>(part[n], query[j], k.x, k.y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kClusterKeys / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float* to = memory.scores[warp][g + 8 * h] + 8 * n;
        if constexpr (kTwice) {
          to[quad] = part[n][2 * h] + part_rest[n][2 * h];
          to[quad + 4] = part[n][2 * h + 1] + part_rest[n][2 * h + 1];
        } else {
          *reinterpret_cast<float2*>(to + 2 * quad) = make_float2(part[n][2 * h], part[n][2 * h + 1]);
        }
      }
    }
    __syncthreads();  // all parts of the scores are written

    float2 score = make_float2(0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 v = *reinterpret_cast<const float2*>(&memory.scores[w][row][2 * pair]);
      score.x += v.x, score.y += v.y;
    }
    const auto finish = [&](float s, int key) {
      const int distance = position - key;
      const bool seen = key < range.end && distance >= 0 && (!t.windowed || distance < t.args.window);
      return seen ? (t.softcap ? t.args.softcap * tanhf(s) : s) * kLog2E : minus_infinity();
    };
    score.x = finish(score.x, first + 2 * pair), score.y = finish(score.y, first + 2 * pair + 1);
    float top = fmaxf(score.x, score.y);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, offset));
    top = fmaxf(top, best);
    const float from = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are 0
    const float shrink = device::exp2_fast(best - from);
    best = top;
    score.x = device::exp2_fast(score.x - from), score.y = device::exp2_fast(score.y - from);
    total = total * shrink + (score.x + score.y);  // over this thread's keys
    *reinterpret_cast<uint32_t*>(&memory.weights[row][2 * pair]) = device::pack2<kBf16>(score.x, score.y);
    if (pair == 0) shrinks[row] = shrink;
    __syncthreads();  // all weights are written

    const float low = shrinks[g], high = shrinks[g + 8];
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i][0] *= low, out[i][1] *= low, out[i][2] *= high, out[i][3] *= high;
#pragma unroll
    for (int half = 0; half < kClusterKeys / 16; ++half) {
      if (16 * half >= keys) break;
      const auto weight = [&](int r, int k) {
        return *reinterpret_cast<const uint32_t*>(&memory.weights[r][16 * half + 2 * quad + k]);
      };
      const uint32_t p[4] = {weight(g, 0), weight(g + 8, 0), weight(g, 8), weight(g + 8, 8)};
      if constexpr (kTwice) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          float v[4][4];  // of the keys for which this lane has weights
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int r = 16 * half + 2 * quad + (i & 1) + 8 * (i >> 1);
            const float4 x = *reinterpret_cast<const float4*>(&memory.rows[stage][r][64 * warp + 32 * b + 4 * g]);
            v[i][0] = x.x, v[i][1] = x.y, v[i][2] = x.z, v[i][3] = x.w;
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            uint32_t rest[2];
            const uint32_t high[2] = {split_pair(v[0][j], v[1][j], rest[0]), split_pair(v[2][j], v[3][j], rest[1])};
            direct::mma<false>(out[4 * b + j], p, high[0], high[1]);
            direct::mma<false>(out[4 * b + j], p, rest[0], rest[1]);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t v[4];
          const Element* at = &memory.rows[stage][16 * half + lane % 16][64 * warp + 16 * i + lane / 16 * 8];
          device::load_matrix_x4_transposed(v, device::shared_address(at));
          direct::mma<kBf16>(out[2 * i], p, v[0], v[1]);
          direct::mma<kBf16>(out[2 * i + 1], p, v[2], v[3]);
        }
      }
    }
    __syncthreads();  // the stage and the weights are read
    load_keys(first + kClusterStages * kClusterKeys, stage, Rows::all);
    device::copy_async_commit();
  }

#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) total += __shfl_xor_sync(device::kFullMask, total, offset);
  if (pair == 0) stats[row] = make_float2(best, total);
  auto* results = reinterpret_cast<float*>(memory.rows);
  if constexpr (kTwice) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // column 2·quad + e % 2 of row g + 8·(e / 2)
        float* to = results + (g + e / 2 * 8) * kResultPitch + 64 * warp + 32 * b + 8 * quad + e % 2 * 4;
        *reinterpret_cast<float4*>(to) =
            make_float4(out[4 * b][e], out[4 * b + 1][e], out[4 * b + 2][e], out[4 * b + 3][e]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float* to = results + g * kResultPitch + 64 * warp + 8 * i + 2 * quad;
      *reinterpret_cast<float2*>(to) = make_float2(out[i][0], out[i][1]);
      *reinterpret_cast<float2*>(to + 8 * kResultPitch) = make_float2(out[i][2], out[i][3]);
    }
  }
  clustered::combine(t, tile, kv_head, cluster, range.active, results, kResultPitch, stats, memory.sent);
#endif
}

}  // namespace dyno::ops::latent_cluster
