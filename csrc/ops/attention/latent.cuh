// Attention over latents (MLA, absorbed): one key row serves up to 16 query heads at once, and its first dimensions are
// the values. The operands are arranged as in direct.cuh, but a head is too wide for a warp's registers. So queries are
// fragments in shared memory. Each warp computes the scores of its own 16 keys, and then 64 dimensions of the output
// for all keys of the block, whose rows are in the caches.
//
// A float32 cache is multiplied as f16 pairs, and so are the scaled queries, because the rounding of a latent would
// affect every head.
#pragma once

#include <cuda_runtime.h>

#include "device/dependent.cuh"
#include "device/flash.cuh"
#include "ops/attention/direct.cuh"

namespace dyno::ops::latent {

using device::Scalar;
using direct::kLn2;
using direct::kLog2E;
using direct::kTileKeys;
using direct::kWarps;

inline constexpr int kTiles = 2;  // tiles of 8 query rows
inline constexpr int kRows = 8 * kTiles;
inline constexpr int kChunks = kLatentMaxKey / 32;
inline constexpr int kMinTiles = 4;  // of keys per block: with fewer, adding the parts costs more than it saves

// Eight adjacent elements: f16 values, and the rests for float32.
template <Scalar kType>
struct Element8 {
  uint4 v;
  __device__ void load(const uint8_t* row, int dim, bool valid, bool aligned) {
    v = valid ? direct::load_16(row + dim * 2, aligned) : uint4{0, 0, 0, 0};
  }
  __device__ uint4 halves(uint4&) const { return v; }
};
__device__ __forceinline__ uint32_t split_pair(float a, float b, uint32_t& rest) {
  const uint32_t high = device::pack_half2(a, b);
  const float2 back = __half22float2(device::as_half2(high));
  rest = device::pack_half2(a - back.x, b - back.y);
  return high;
}
template <>
struct Element8<Scalar::f32> {
  uint4 a, b;
  __device__ void load(const uint8_t* row, int dim, bool valid, bool aligned) {
    a = valid ? direct::load_16(row + dim * 4, aligned) : uint4{0, 0, 0, 0};
    b = valid ? direct::load_16(row + dim * 4 + 16, aligned) : uint4{0, 0, 0, 0};
  }
  __device__ uint4 halves(uint4& rest) const {
    const auto f = [](uint32_t bits) { return __uint_as_float(bits); };
    uint4 out;
    out.x = split_pair(f(a.x), f(a.y), rest.x);
    out.y = split_pair(f(a.z), f(a.w), rest.y);
    out.z = split_pair(f(b.x), f(b.y), rest.z);
    out.w = split_pair(f(b.z), f(b.w), rest.w);
    return out;
  }
};

// kSelected: each token reads the positions of its list.
template <Scalar kType, bool kSelected>
__global__ void __launch_bounds__(32 * kWarps, 1) latent_kernel(const __grid_constant__ DirectTask task) {
  constexpr bool kBf16 = kType == Scalar::bf16, kTwice = kType == Scalar::f32;
  constexpr int kBatch = kTwice ? 3 : 6;            // chunks of 32 dimensions that are loaded at once
  constexpr int kDepth = kTwice ? 2 : 4;            // tiles of values that are loaded ahead
  extern __shared__ __align__(16) uint4 queries[];  // [high parts, rests][chunk][8 rows][lane]
  __shared__ uint2 weights[kWarps][kTiles][32];     // for each tile of keys
  __shared__ float tops[kWarps][kRows], sums[kWarps][kRows];
  device::let_next_start();
  const CudaAttention& t = task.common;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, quad = lane % 4;
  const int kv_head = blockIdx.y, split = blockIdx.z;
  const CudaTile tile = find_tile_of<kSelected>(t, blockIdx.x, kRows);
  const KeyRange range = direct::block_keys<kMinTiles>(t, tile, split);
  if (tile.empty() || split >= range.active) return;

  const uint8_t* base = key_rows(t, tile.run, kv_head);
  const int64_t stride = t.args.k_row_bytes;
  const KeyRows<kSelected> rows(t, tile);
  const auto row_of = [&](int key) {
    if constexpr (kSelected) key = key < range.end ? rows[key] : 0;
    return base + key * stride;
  };
  const int chunks = (t.dk + 31) / 32, batches = (chunks + kBatch - 1) / kBatch;
  using Row = Element8<kType>;
  Row keys[kBatch][2], next_keys[kBatch][2];
  const auto load_keys = [&](Row(&to)[kBatch][2], int first, int batch) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first + g + 8 * h;
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        const int dim = 32 * (batch * kBatch + c) + 8 * quad;
        to[c][h].load(row_of(key), dim, key < range.end && dim < t.dk, task.aligned);
      }
    }
  };
  const int value_dim = 64 * warp + 8 * g;
  const auto load_values = [&](Row(&to)[4], int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + 2 * quad + (i & 1) + 8 * (i >> 1);
      to[i].load(row_of(key), value_dim, key < range.end && value_dim < t.dv, task.aligned);
    }
  };
  // The rows of a tile are loaded in several steps. The prefetch avoids waits for memory in all but the first; L2 has
  // no stale data.
  const int row_bytes = t.dk * (kTwice ? 4 : 2), lines = (row_bytes + 127) / 128;
  const auto prefetch_rows = [&](int first) {
    for (int i = lane; i < kTileKeys * lines; i += 32) {
      const int key = first + i / lines;
      if (key < range.end) device::prefetch_l2(row_of(key) + min(i % lines * 128, row_bytes - 4));
    }
  };
  int mine = range.begin + warp * kTileKeys;      // the keys of this warp's scores
  if constexpr (!kSelected) prefetch_rows(mine);  // the previous launch may write the list
  const bool early = !kSelected && task.early && mine + kTileKeys <= tile.run.position;
  if (early && mine < range.end) load_keys(keys, mine, 0);
  device::wait_for_previous();
  if (!early && mine < range.end) load_keys(keys, mine, 0);

  const float scale = t.query_scale();
  for (int i = threadIdx.x; i < chunks * kTiles * 32; i += 32 * kWarps) {
    const int at = i % 32, n = i / 32 % kTiles, c = i / (32 * kTiles);
    const int row = n * 8 + at / 4, dim = 32 * c + at % 4 * 8;
    uint32_t half[4] = {}, rest[4] = {};
    if (row < tile.rows() && dim < t.dk) {
      const float* from = query_row(t, tile, tile.row_begin + row, kv_head) + dim;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float a = from[2 * j] * scale, b = from[2 * j + 1] * scale;
        if constexpr (kTwice) {
          half[j] = split_pair(a, b, rest[j]);
        } else {
          half[j] = device::pack2_finite<kBf16>(a, b);
        }
      }
    }
    queries[i] = {half[0], half[1], half[2], half[3]};
    if constexpr (kTwice) queries[kChunks * kTiles * 32 + i] = {rest[0], rest[1], rest[2], rest[3]};
  }
  __syncthreads();  // queries are written

  int position[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      position[n][e] = tile.run.position + min(tile.row_begin + n * 8 + 2 * quad + e, tile.row_end - 1) / t.group;
    }
  }
  float out[4][kTiles][4] = {};
  float best[kTiles][2], total[kTiles][2] = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) best[n][0] = best[n][1] = minus_infinity();

  for (int first = range.begin; first < range.end; first += kWarps * kTileKeys, mine += kWarps * kTileKeys) {
    float scores[kTiles][4] = {};
    if (mine < range.end) {
      for (int batch = 0; batch < batches; ++batch) {
        if (batch + 1 < batches) load_keys(next_keys, mine, batch + 1);
#pragma unroll
        for (int c = 0; c < kBatch; ++c) {
          const int chunk = batch * kBatch + c;
          if (chunk >= chunks) break;
          uint4 low_rest, high_rest;
          const uint4 low = keys[c][0].halves(low_rest), high = keys[c][1].halves(high_rest);
          const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const uint4 q = queries[(chunk * kTiles + n) * 32 + lane];
            direct::mma<kBf16>(scores[n], a[0], q.x, q.y);
            direct::mma<kBf16>(scores[n], a[1], q.z, q.w);
            if constexpr (kTwice) {
              const uint32_t r[2][4] = {{low_rest.x, high_rest.x, low_rest.y, high_rest.y},
                                        {low_rest.z, high_rest.z, low_rest.w, high_rest.w}};
              const uint4 q_rest = queries[(kChunks * kTiles + chunk * kTiles + n) * 32 + lane];
              direct::mma<false>(scores[n], r[0], q.x, q.y);
              direct::mma<false>(scores[n], r[1], q.z, q.w);
              direct::mma<false>(scores[n], a[0], q_rest.x, q_rest.y);
              direct::mma<false>(scores[n], a[1], q_rest.z, q_rest.w);
            }
          }
        }
#pragma unroll
        for (int c = 0; c < kBatch; ++c) keys[c][0] = next_keys[c][0], keys[c][1] = next_keys[c][1];
      }
    }
    const int next = mine + kWarps * kTileKeys;
    prefetch_rows(next);
    if (next < range.end) load_keys(keys, next, 0);
    Row values[kDepth][4];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) load_values(values[i], first + i * kTileKeys);

#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = mine + g + 8 * (j >> 1), distance = position[n][j & 1] - key;
        const float score = (t.softcap ? t.args.softcap * tanhf(scores[n][j]) : scores[n][j]) * kLog2E;
        const bool seen = key < range.end && distance >= 0 && (!t.windowed || distance < t.args.window);
        scores[n][j] = seen ? score : minus_infinity();
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(scores[n][e], scores[n][2 + e]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, offset));
        }
        if (g == 0) tops[warp][n * 8 + 2 * quad + e] = top;
      }
    }
    __syncthreads();  // all maxima are written, the last weights are read
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = best[n][e];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) top = fmaxf(top, tops[w][n * 8 + 2 * quad + e]);
        const float from = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are 0
        const float shrink = device::exp2_fast(best[n][e] - from);
        best[n][e] = top;
        scores[n][e] = device::exp2_fast(scores[n][e] - from);
        scores[n][2 + e] = device::exp2_fast(scores[n][2 + e] - from);
        total[n][e] = total[n][e] * shrink + scores[n][e] + scores[n][2 + e];  // over this lane's keys
#pragma unroll
        for (int m = 0; m < 4; ++m) out[m][n][e] *= shrink, out[m][n][2 + e] *= shrink;
      }
      weights[warp][n][lane] = {direct::transpose_8x8(device::pack2<kBf16>(scores[n][0], scores[n][1])),
                                direct::transpose_8x8(device::pack2<kBf16>(scores[n][2], scores[n][3]))};
    }
    __syncthreads();  // all weights are written
#pragma unroll
    for (int tile_keys = 0; tile_keys < kWarps; ++tile_keys) {
      if (first + tile_keys * kTileKeys >= range.end) break;
      Row(&now)[4] = values[tile_keys % kDepth];
      uint4 rest[4];
      const uint4 v[4] = {now[0].halves(rest[0]), now[1].halves(rest[1]), now[2].halves(rest[2]),
                          now[3].halves(rest[3])};
      const uint2 b[kTiles] = {weights[tile_keys][0][lane], weights[tile_keys][1][lane]};
      const auto add = [&](const uint4(&from)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t a[4] = {__byte_perm(direct::word_of(from[0], j), direct::word_of(from[1], j), 0x5410),
                                 __byte_perm(direct::word_of(from[0], j), direct::word_of(from[1], j), 0x7632),
                                 __byte_perm(direct::word_of(from[2], j), direct::word_of(from[3], j), 0x5410),
                                 __byte_perm(direct::word_of(from[2], j), direct::word_of(from[3], j), 0x7632)};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) direct::mma<kBf16>(out[j][n], a, b[n].x, b[n].y);
        }
      };
      add(v);
      if constexpr (kTwice) add(rest);
      if (tile_keys + kDepth < kWarps) load_values(now, first + (tile_keys + kDepth) * kTileKeys);
    }
  }

#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        total[n][e] += __shfl_xor_sync(device::kFullMask, total[n][e], offset);
      }
      if (g == 0) sums[warp][n * 8 + 2 * quad + e] = total[n][e];
    }
  }
  __syncthreads();  // all sums are written
  const bool whole = range.active == 1;
  const direct::Partials parts(t, kRows, kv_head);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = n * 8 + 2 * quad + e;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += sums[w][row];
      if (row >= tile.rows()) continue;
      if (!whole && warp == 0 && g == 0) parts.stats[split * kRows + row] = make_float2(best[n][e], sum);
      if (value_dim >= t.dv) continue;
      const float factor = whole ? output_factor(t, tile.row_begin + row, kv_head, best[n][e] * kLn2, sum) : 1.0f;
      float* to = (whole ? output_row(t, tile, tile.row_begin + row, kv_head)
                         : parts.values + (int64_t{split} * kRows + row) * t.dv) +
                  value_dim;
#pragma unroll
      for (int j = 0; j < 4; ++j) to[2 * j] = out[j][n][e] * factor, to[2 * j + 1] = out[j][n][2 + e] * factor;
    }
  }
}

}  // namespace dyno::ops::latent
