// Attention of few query rows over a long cache. Keys and values are loaded directly into the registers of the tensor
// core fragments, without shared memory, so that as many loads as registers allow are in flight. Rows of q8_0 that
// begin at multiples of 16 bytes pass through shared memory instead (kStaged, direct_stage.cuh).
//
// Both products are transposed: keys, then dimensions, are the 16 rows of an MMA, and 8 query rows are its columns:
//   scores[16 keys, 8 rows] = K · Qᵀ,   out[16 dims, 8 rows] += Vᵀ · P
// The order of the summed index is free, and so is the order of rows. So lane 4·g + t reads 16 contiguous bytes instead
// of 4 pieces of 4 bytes: of keys g and g + 8 the dimensions 32·c + 8·t … + 7; of keys 2·t, 2·t + 1, 2·t + 8, 2·t + 9
// the dimensions 64·c + 8·g … + 7 (of staged rows, see direct_stage.cuh). A q8_0 key is multiplied as integers, and its
// scales are applied to the scores of each 32 dimensions. Keys and values have template parameters of their own, since
// one of them may be f16 and the other q8_0.
//
// A warp processes every eighth tile of 16 keys of its block's part, with loads one step ahead. Warps combine their
// results in shared memory, always in the same order, and a launch of its own adds the parts of blocks (add_parts.cuh).
// For heads wider than 256, a team of two warps processes a tile: each has half of the dimensions, and they exchange
// their halves of the scores.
//
// kFused: queries, and keys and values of new tokens, are inputs before norm and rotation; the kernel also stores the
// new keys and values (direct_fresh.cuh). Each block computes the rows that it needs in shared memory while its first
// loads are in flight.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/flash.cuh"
#include "device/mbarrier.cuh"
#include "ops/attention/add_parts.cuh"
#include "ops/attention/direct_fresh.cuh"
#include "ops/attention/direct_pieces.cuh"
#include "ops/attention/direct_stage.cuh"
#include "ops/attention/tile.cuh"

namespace dyno::ops {

struct DirectTask {
  CudaAttention common;
  FreshRows fresh;  // for fused kernels
  bool aligned;     // heads of f16 and bf16 caches start at 16-byte addresses, and have whole 16 bytes
  // Whether rows of earlier tokens are settled and do not share a 32-byte sector. Such a row can be loaded before the
  // previous launch has ended: this leaves no stale data of a neighbour row, which that launch may write, in a cache.
  bool early;
  bool staged;  // q8_0 rows pass through shared memory
};

DirectTask rope_direct_task(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int splits,
                            CudaStream& stream);

// Whether steps.cuh supports the launch: one token per run, f16 or bf16, one part of the keys.
bool steps_attention_takes(const DirectTask& task);
// `tiles`: 0, or the height of the HalfTiles that it writes.
void steps_attention(const DirectTask& task, bool bf16, int64_t tiles, CUstream_st* stream);

namespace direct {

using device::transpose_8x8;

inline constexpr int kWarps = kDirectWarps;
inline constexpr float kLog2E = 1.4426950408889634f;

// The keys of a block: at least kMinTiles tiles, by default one for each of its warps, so that few keys need only one
// block.
template <int kMinTiles = kWarps>
__device__ __forceinline__ KeyRange block_keys(const CudaAttention& t, const CudaTile& tile, int split) {
  const int keys = tile.key_end - tile.key_begin;
  const int even = ((keys + t.splits - 1) / t.splits + kTileKeys - 1) / kTileKeys * kTileKeys;
  const int each = max(even, kMinTiles * kTileKeys);
  const int begin = tile.key_begin + split * each;
  return {begin, min(begin + each, tile.key_end), (keys + each - 1) / each};
}

// The parts of a tile.
template <int kMinTiles>
struct BlockParts {
  static __device__ int of(const CudaAttention& t, const CudaTile& tile) {
    return block_keys<kMinTiles>(t, tile, 0).active;
  }
};

// kKey, kValue: types of the caches, the same if kFused. kTiles: number of tiles of 8 query rows. kStaged: rows of q8_0
// pass through shared memory; for heads of exactly kHead.
template <int kHead, Scalar kKey, Scalar kValue, int kTiles, bool kFused, bool kStaged>
__global__ void __launch_bounds__(32 * kWarps, direct_blocks(kHead, 8 * kTiles, kFused, kStaged))
    direct_kernel(const __grid_constant__ DirectTask task) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  if constexpr (kStaged) return __trap();  // never launched, because these chips have no asynchronous copies
#endif
  constexpr int kSharers = direct_sharers(kHead), kTeams = kWarps / kSharers, kWidth = kHead / kSharers;
  constexpr int kRows = 8 * kTiles, kKeyChunks = kWidth / 32, kValueChunks = kWidth / 64;
  constexpr int kPass = kValueChunks < 2 ? kValueChunks : 2, kPasses = kValueChunks / kPass;
  constexpr int kPitch = kHead + 4;
  constexpr bool kBf16 = kKey == Scalar::bf16, kScaled = kKey == Scalar::q8_0;
  constexpr bool kStageKeys = kStaged && kKey == Scalar::q8_0, kStageValues = kStaged && kValue == Scalar::q8_0;
  static_assert(kBf16 == (kValue == Scalar::bf16) && (!kFused || kKey == kValue));
  static_assert(kStaged == (kStageKeys || kStageValues));
  constexpr int kCommon = direct_common_bytes(kHead, kRows, kStageKeys + kStageValues) / sizeof(float);
  // The ring of staged rows, [warp]; later [team][row][kPitch].
  extern __shared__ __align__(16) float merged[];
  __shared__ float2 stats[kTeams][kRows];
  device::let_next_start();
  const CudaAttention& t = task.common;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, quad = lane % 4;
  const int team = warp / kSharers, dims = warp % kSharers * kWidth;  // first dimension of the warp
  const int kv_head = blockIdx.y, split = blockIdx.z;
  // The runs, and rows of earlier tokens, do not depend on launches that are still running.
  const CudaTile tile = find_tile_warp(t, blockIdx.x, kRows, lane);
  const KeyRange range = block_keys<kTeams>(t, tile, split);
  if (tile.empty() || split >= range.active) return;

  const uint8_t* key_base = key_rows(t, tile.run, kv_head);
  const uint8_t* value_base = value_rows(t, tile.run, kv_head);
  const int64_t value_stride = t.v_in_k ? t.args.k_row_bytes : t.args.v_row_bytes;
  Piece<kKey> keys[kKeyChunks][2];
  Piece<kValue> values[kPass][4];
  using Memory = FreshMemory<kHead, kRows>;
  auto& memory = *reinterpret_cast<Memory*>(merged + kCommon);
  const FreshKeys fresh(tile, range);
  const int fresh_begin = tile.run.position + fresh.first;
  // Loads a row from the cache, or from shared memory, which has new rows in the form of the cache.
  const auto load_row = [&](auto& to, int cache, const uint8_t* row, int key, int dim, int width, Rows which) {
    const bool is_fresh = key >= fresh_begin && key < range.end;
    if (which != Rows::all && is_fresh != (which == Rows::fresh)) return;
    if (kFused && is_fresh && dim < width) return to.load_shared(memory.stored[cache][key - fresh_begin], dim);
    to.load(row, dim, width, key < range.end, task.aligned);
  };
  const auto load_keys = [&](int first, Rows which) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first + g + 8 * h;
      const uint8_t* row = key_base + key * t.args.k_row_bytes;
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) load_row(keys[c][h], 0, row, key, dims + 32 * c + 8 * quad, t.dk, which);
    }
  };
  const auto load_values = [&](int first, int pass, Rows which) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + 2 * quad + (i & 1) + 8 * (i >> 1);
      const uint8_t* row = value_base + key * value_stride;
#pragma unroll
      for (int c = 0; c < kPass; ++c) {
        load_row(values[c][i], 1, row, key, dims + 64 * (pass * kPass + c) + 8 * g, t.dv, which);
      }
    }
  };
  const int start = range.begin + team * kTileKeys;
  Stage<kWidth, kStageKeys, kStageValues, kFused> stage(
      reinterpret_cast<uint8_t*>(merged) + warp * decltype(stage)::kWarpBytes, key_base + dims / 32 * 34,
      t.args.k_row_bytes, value_base + dims / 32 * 34, value_stride, memory.stored[0][0], lane, kTeams * kTileKeys,
      range.end, fresh_begin);
  const auto load_first = [&](Rows which) {
    if constexpr (kStaged) stage.begin(start, which);
    if constexpr (!kStageKeys) load_keys(start, which);
    if constexpr (!kStageValues) load_values(start, 0, which);
  };
  constexpr int kFirstKeys = (kStaged ? kTeams + 1 : 1) * kTileKeys;  // up to the last of the first rows
  const bool works = start < range.end, with_fresh = works && start + kFirstKeys > fresh_begin;
  if (task.early && works) load_first(Rows::settled);
  FreshWork<kHead, kKey, kRows> work{t, task.fresh, tile, fresh, memory, kv_head, lane, warp};
  if constexpr (kFused) {
    work.prepare();
    __syncthreads();  // the angles are written
  }
  device::wait_for_previous();
  if (!task.early && works) load_first(Rows::settled);
  if constexpr (kFused) {
    work.run();
    __syncthreads();  // queries and new rows are written
  }
  if (with_fresh) load_first(Rows::fresh);

  // Scaled queries: of row g of each 8, the dimensions for which this lane has the keys.
  uint32_t query[kKeyChunks][kTiles][4];
  const float scale = t.query_scale();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int row = n * 8 + g;
    const float* from = row >= tile.rows() ? nullptr
                        : kFused           ? memory.queries[row]
                                           : query_row(t, tile, tile.row_begin + row, kv_head);
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int dim = dims + 32 * c + (kStageKeys ? 4 * quad + 2 * (j & 1) + 16 * (j >> 1) : 8 * quad + 2 * j);
        const bool valid = from != nullptr && dim < t.dk;
        query[c][n][j] =
            device::pack2_finite<kBf16>(valid ? from[dim] * scale : 0.0f, valid ? from[dim + 1] * scale : 0.0f);
      }
    }
  }
  // Positions of rows 2·quad and 2·quad + 1 of each 8; rows past the end use the position of the last row.
  int position[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      position[n][e] = tile.run.position + min(tile.row_begin + n * 8 + 2 * quad + e, tile.row_end - 1) / t.group;
    }
  }
  const int first_position = tile.run.position + tile.row_begin / t.group;
  const int last_position = tile.run.position + (tile.row_end - 1) / t.group;

  float out[4 * kValueChunks][kTiles][4] = {};
  float best[kTiles][2], total[kTiles][2] = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) best[n][0] = best[n][1] = minus_infinity();

  // Scores of a step from the dimensions of one warp, [step % 2][warp][tile of rows][lane].
  auto* exchanged = reinterpret_cast<float4*>(merged + kCommon);
  int step = 0;
  for (int first = start; first < range.end; first += kTeams * kTileKeys) {
    const int next = first + kTeams * kTileKeys;
    float scores[kTiles][4] = {};
    if constexpr (kStaged) stage.ready_keys(first);
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) {
      if constexpr (kStageKeys) keys[c][0] = stage.key(0, c), keys[c][1] = stage.key(8, c);
      const uint4 low = keys[c][0].unscaled(), high = keys[c][1].unscaled();
      const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        if constexpr (kScaled) {
          float part[4] = {};
          mma<kBf16>(part, a[0], query[c][n][0], query[c][n][1]);
          mma<kBf16>(part, a[1], query[c][n][2], query[c][n][3]);
          const float d0 = keys[c][0].scale(), d1 = keys[c][1].scale();
          scores[n][0] += part[0] * d0, scores[n][1] += part[1] * d0;
          scores[n][2] += part[2] * d1, scores[n][3] += part[3] * d1;
        } else {
          mma<kBf16>(scores[n], a[0], query[c][n][0], query[c][n][1]);
          mma<kBf16>(scores[n], a[1], query[c][n][2], query[c][n][3]);
        }
      }
    }
    if constexpr (!kStageKeys) {
      if (next < range.end) load_keys(next, Rows::all);
    }
    if constexpr (kSharers == 2) {
      const auto place = [&](int of, int n) -> float4& {
        return exchanged[((step % 2 * kWarps + of) * kTiles + n) * 32 + lane];
      };
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        place(warp, n) = make_float4(scores[n][0], scores[n][1], scores[n][2], scores[n][3]);
      }
      // Both warps have written, and both have read the scores of the step before the last one.
      device::named_sync(1 + team, 64);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float4 other = place(warp ^ 1, n);
        scores[n][0] += other.x, scores[n][1] += other.y, scores[n][2] += other.z, scores[n][3] += other.w;
      }
      ++step;
    }

    const bool edge = first + kTileKeys > range.end || first + kTileKeys - 1 > first_position ||
                      (t.windowed && first <= last_position - t.args.window);
    uint32_t weights[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float score = (t.softcap ? t.args.softcap * tanhf(scores[n][j]) : scores[n][j]) * kLog2E;
        if (edge) {
          const int key = first + g + 8 * (j >> 1), distance = position[n][j & 1] - key;
          const bool seen = key < range.end && distance >= 0 && (!t.windowed || distance < t.args.window);
          if (!seen) score = minus_infinity();
        }
        scores[n][j] = score;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(scores[n][e], scores[n][2 + e]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, offset));
        }
        top = fmaxf(top, best[n][e]);
        const float base = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are 0
        const float shrink = device::exp2_fast(best[n][e] - base);
        best[n][e] = top;
        scores[n][e] = device::exp2_fast(scores[n][e] - base);
        scores[n][2 + e] = device::exp2_fast(scores[n][2 + e] - base);
        total[n][e] = total[n][e] * shrink + scores[n][e] + scores[n][2 + e];  // over this lane's keys
#pragma unroll
        for (int m = 0; m < 4 * kValueChunks; ++m) out[m][n][e] *= shrink, out[m][n][2 + e] *= shrink;
      }
      weights[n][0] = transpose_8x8(device::pack2<kBf16>(scores[n][0], scores[n][1]));
      weights[n][1] = transpose_8x8(device::pack2<kBf16>(scores[n][2], scores[n][3]));
    }

    if constexpr (kStaged) stage.ready_values(first);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int c = 0; c < kPass; ++c) {
        const auto value = [&](int i) {
          if constexpr (!kStageValues) return values[c][i].values();
          return stage.value((i & 1) + 8 * (i >> 1), 2 * (pass * kPass + c)).values();
        };
        const uint4 v[4] = {value(0), value(1), value(2), value(3)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t a[4] = {__byte_perm(word_of(v[0], j), word_of(v[1], j), 0x5410),
                                 __byte_perm(word_of(v[0], j), word_of(v[1], j), 0x7632),
                                 __byte_perm(word_of(v[2], j), word_of(v[3], j), 0x5410),
                                 __byte_perm(word_of(v[2], j), word_of(v[3], j), 0x7632)};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            mma<kBf16>(out[(pass * kPass + c) * 4 + j][n], a, weights[n][0], weights[n][1]);
          }
        }
      }
      if constexpr (!kStageValues) {
        if (pass + 1 < kPasses) {
          load_values(first, pass + 1, Rows::all);
        } else if (next < range.end) {
          load_values(next, 0, Rows::all);
        }
      }
    }
    if constexpr (kStaged) stage.next();
  }

  if constexpr (kStaged)
    __syncthreads();  // all rows are read; the memory is reused
                      // The results of the warps, in order.
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        total[n][e] += __shfl_xor_sync(device::kFullMask, total[n][e], offset);
      }
      const int row = n * 8 + 2 * quad + e;
      if (g == 0) stats[team][row] = make_float2(best[n][e], total[n][e]);  // the warps of a team have the same values
      float* to = merged + (team * kRows + row) * kPitch + dims + (kStageValues ? 4 : 8) * g;
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          *reinterpret_cast<float4*>(to + 64 * c + (kStageValues ? 16 : 2) * j) = make_float4(
              out[4 * c + j][n][e], out[4 * c + j][n][2 + e], out[4 * c + j + 1][n][e], out[4 * c + j + 1][n][2 + e]);
        }
      }
    }
  }
  __syncthreads();  // all results are written
  const bool whole = range.active == 1;
  const Partials parts(t, kRows, kv_head);
  const int quads = t.dv / 4;
  for (int i = threadIdx.x; i < tile.rows() * quads; i += 32 * kWarps) {
    const int row = i / quads, at = i % quads * 4;
    float top = minus_infinity(), sum = 0;
#pragma unroll
    for (int w = 0; w < kTeams; ++w) top = fmaxf(top, stats[w][row].x);
    const float base = top == minus_infinity() ? 0.0f : top;
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kTeams; ++w) {
      const float weight = exp2f(stats[w][row].x - base);
      sum += stats[w][row].y * weight;
      const float4 part = *reinterpret_cast<const float4*>(merged + (w * kRows + row) * kPitch + at);
      v.x += part.x * weight, v.y += part.y * weight, v.z += part.z * weight, v.w += part.w * weight;
    }
    if (whole) {
      const float factor = output_factor(t, tile.row_begin + row, kv_head, top * kLn2, sum);
      float* to = output_row(t, tile, tile.row_begin + row, kv_head) + at;
      to[0] = v.x * factor, to[1] = v.y * factor, to[2] = v.z * factor, to[3] = v.w * factor;
    } else {
      reinterpret_cast<float4*>(parts.values + (int64_t{split} * kRows + row) * t.dv)[at / 4] = v;
      if (at == 0) parts.stats[split * kRows + row] = make_float2(top, sum);
    }
  }
}

}  // namespace direct
}  // namespace dyno::ops
