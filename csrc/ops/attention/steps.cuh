// Attention of one token of each of many sequences: as direct.cuh with 8 query rows and one part of the keys, for the
// shapes of most models. A warp runs about 1,000 instead of 2,000 instructions. Instructions bound a step of some
// dozens of sequences, not the cache: the loads of keys and values of the first 128 positions are issued before the
// previous launch has ended.
//
// A block has one sequence and one key head. Its eight warps process the keys as in direct.cuh, and every thread adds
// four dimensions of a row. The output is float32, or HalfTiles for the next product: two warps have 256 adjacent
// values.
#pragma once

#include "ops/attention/direct.cuh"
#include "ops/half_tiles.cuh"

namespace dyno::ops::steps {

using direct::kTileKeys;
using direct::kWarps;
inline constexpr int kRows = kStepsRows;

template <int kHead>
struct Shared {
  static constexpr int kHalfPitch = kHead + 8, kPitch = kHead + 4;
  uint16_t queries[kRows][kHalfPitch];
  float2 stats[kWarps][kRows];  // maximum in units of log2, sum
  float merged[kWarps][kRows][kPitch];
};

// Reloaded for every tile, because keeping it would take registers that are needed elsewhere.
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

// Loads 16 bytes from the cache if `condition` holds. Written as a branch, it would move an array out of registers.
__device__ __forceinline__ void load_if(bool condition, uint4& to, const uint8_t* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}\n"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "l"(from), "r"(static_cast<uint32_t>(condition))
               : "memory");
}

// kTiles: writes HalfTiles of height `height`, at `out` of the task.
template <int kHead, bool kBf16, bool kTiles>
__device__ __forceinline__ void attend(const DirectTask& task, [[maybe_unused]] int height) {
  constexpr int kKeyChunks = kHead / 32, kValueChunks = kHead / 64;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared<kHead>*>(raw);
  device::let_next_start();
  const CudaAttention& t = task.common;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, quad = lane % 4;
  const int kv_head = blockIdx.y;
  // The runs, and rows of earlier tokens, do not depend on launches that are still running.
  const SequenceRun run = t.args.runs[blockIdx.x];
  if (run.n_tokens == 0) return;
  const int position = run.position;
  const int begin = t.windowed ? max(0, position - t.args.window + 1) : 0, end = position + 1;
  const int start = begin + warp * kTileKeys;
  const bool works = start < end;
  const uint8_t* key_at = key_rows(t, run, kv_head) + (start + g) * t.args.k_row_bytes + 16 * quad;
  const uint8_t* value_at = value_rows(t, run, kv_head) + (start + 2 * quad) * t.args.v_row_bytes + 16 * g;
  const uint32_t k_step = static_cast<uint32_t>(t.args.k_row_bytes), v_step = static_cast<uint32_t>(t.args.v_row_bytes);
  uint4 keys[kKeyChunks][2], values[kValueChunks][4];
  // Loads rows of the tile at `first`, which the pointers refer to, for positions in [from, to). `fresh`: leaves other
  // rows unchanged; otherwise sets them to zero.
  const auto load_keys = [&](int first, int from, int to, bool fresh) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = first + g + 8 * h;
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) {
        if (!fresh) keys[c][h] = {0, 0, 0, 0};
        load_if(key >= from && key < to, keys[c][h], key_at + 8 * h * k_step + 64 * c);
      }
    }
  };
  const auto load_values = [&](int first, int from, int to, bool fresh) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = (i & 1) + 8 * (i >> 1), key = first + 2 * quad + row;
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        if (!fresh) values[c][i] = {0, 0, 0, 0};
        load_if(key >= from && key < to, values[c][i], value_at + row * v_step + 128 * c);
      }
    }
  };
  const int settled = task.early ? position : 0;
  if (works) load_keys(start, 0, settled, false), load_values(start, 0, settled, false);
  device::wait_for_previous();
  if (works && start + kTileKeys > settled)
    load_keys(start, settled, end, true), load_values(start, settled, end, true);

  // A warp packs each scaled query row in the reading order of the products; columns that are not stored are zeros.
  {
    constexpr int kPer = kHead / 32;
    uint32_t packed[kPer / 2] = {};
    if (warp < t.group) {
      const float scale = t.query_scale();
      const float* from = t.args.q + run.first_token * t.args.q_stride + int64_t{kv_head * t.group + warp} * kHead;
#pragma unroll
      for (int j = 0; j < kPer / 2; ++j) {
        const float2 v = reinterpret_cast<const float2*>(from)[kPer / 2 * lane + j];
        packed[j] = device::pack2_finite<kBf16>(v.x * scale, v.y * scale);
      }
    }
#pragma unroll
    for (int j = 0; j < kPer / 2; ++j) {
      reinterpret_cast<uint32_t*>(shared.queries[warp])[kPer / 2 * lane + j] = packed[j];
    }
  }
  __syncthreads();  // queries are written

  if (works) {
    const uint32_t query_at = device::shared_address(shared.queries[g] + 8 * quad);
    float out[4 * kValueChunks][4] = {};
    float best[2] = {minus_infinity(), minus_infinity()}, total[2] = {};
#pragma unroll 1
    for (int first = start; first < end; first += kWarps * kTileKeys) {
      // Two sums, so that a product waits only for every second product before it.
      float part[2][4] = {};
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) {
        const uint4 &low = keys[c][0], &high = keys[c][1];
        const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
        const uint4 query = load_shared(query_at + 64 * c);  // of row g, the dimensions for which this lane has the
                                                             // keys
        direct::mma<kBf16>(part[0], a[0], query.x, query.y);
        direct::mma<kBf16>(part[1], a[1], query.z, query.w);
      }
      const int next = first + kWarps * kTileKeys;
      key_at += kWarps * kTileKeys * t.args.k_row_bytes;
      if (next < end) load_keys(next, 0, end, false);

      float scores[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool seen = first + g + 8 * (j >> 1) < end;
        scores[j] = seen ? (part[0][j] + part[1][j]) * direct::kLog2E : minus_infinity();
      }
      uint32_t weights[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float top = fmaxf(scores[e], scores[2 + e]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, offset));
        }
        top = fmaxf(top, best[e]);
        const float base = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are 0
        scores[e] = device::exp2_fast(scores[e] - base);
        scores[2 + e] = device::exp2_fast(scores[2 + e] - base);
        if (first != start) {
          const float shrink = device::exp2_fast(best[e] - base);
          total[e] *= shrink;
#pragma unroll
          for (int m = 0; m < 4 * kValueChunks; ++m) out[m][e] *= shrink, out[m][2 + e] *= shrink;
        }
        best[e] = top;
        total[e] += scores[e] + scores[2 + e];  // over this lane's keys
      }
      weights[0] = direct::transpose_8x8(device::pack2<kBf16>(scores[0], scores[1]));
      weights[1] = direct::transpose_8x8(device::pack2<kBf16>(scores[2], scores[3]));
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t v[4] = {direct::word_of(values[c][0], j), direct::word_of(values[c][1], j),
                                 direct::word_of(values[c][2], j), direct::word_of(values[c][3], j)};
          const uint32_t a[4] = {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
                                 __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632)};
          direct::mma<kBf16>(out[c * 4 + j], a, weights[0], weights[1]);
        }
      }
      value_at += kWarps * kTileKeys * t.args.v_row_bytes;
      if (next < end) load_values(next, 0, end, false);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        total[e] += __shfl_xor_sync(device::kFullMask, total[e], offset);
      }
      const int column = 2 * quad + e;
      if (column >= t.group) continue;
      if (g == 0) shared.stats[warp][column] = make_float2(best[e], total[e]);
      float* to = shared.merged[warp][column] + 8 * g;
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          *reinterpret_cast<float4*>(to + 64 * c + 2 * j) =
              make_float4(out[4 * c + j][e], out[4 * c + j][2 + e], out[4 * c + j + 1][e], out[4 * c + j + 1][2 + e]);
        }
      }
    }
  }
  __syncthreads();  // all warps' results are written

  constexpr int kQuads = kHead / 4;
  const int row = static_cast<int>(threadIdx.x) / kQuads, dim = static_cast<int>(threadIdx.x) % kQuads * 4;
  if (row >= t.group) return;
  const int warps = (end - begin + kTileKeys - 1) / kTileKeys;  // warps with keys; may exceed the number of warps
  float2 stat[kWarps];
  float4 part[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const bool has = w < warps;
    stat[w] = has ? shared.stats[w][row] : make_float2(minus_infinity(), 0);
    part[w] = has ? *reinterpret_cast<const float4*>(shared.merged[w][row] + dim) : make_float4(0, 0, 0, 0);
  }
  float top = stat[0].x, sum = 0;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) top = fmaxf(top, stat[w].x);
  const float base = top == minus_infinity() ? 0.0f : top;
  float4 v = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float weight = device::exp2_fast(stat[w].x - base);
    sum += stat[w].y * weight;
    v.x += part[w].x * weight, v.y += part[w].y * weight, v.z += part[w].z * weight, v.w += part[w].w * weight;
  }
  const float factor = output_factor(t, row, kv_head, top * direct::kLn2, sum);
  if constexpr (kTiles) {
    __shared__ float largest[kWarps];
    const int blocks = t.kv_heads * t.group * kHead / HalfTiles::kBlock;
    const int at = (kv_head * t.group + row) * kHead + dim;
    v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    most = device::warp_max(most);
    if (lane == 0) largest[warp] = most;
    device::named_sync(1 + warp / 2, 64);  // both warps of 256 adjacent values have their results
    const float scale = device::row_scale(fmaxf(most, largest[warp ^ 1]));
    uint8_t* block =
        reinterpret_cast<uint8_t*>(t.args.out) +
        (int64_t{run.first_token / height} * blocks + at / HalfTiles::kBlock) * height * HalfTiles::kRowBytes;
    cuda::put_half_tiles(v, scale, block, height, run.first_token % height, at % HalfTiles::kBlock);
  } else {
    float* to = t.args.out + run.first_token * t.args.out_stride + int64_t{kv_head * t.group + row} * kHead + dim;
    *reinterpret_cast<float4*>(to) = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
  }
}

// Two blocks fit on a multiprocessor.
template <int kHead, bool kBf16>
__global__ void __launch_bounds__(32 * kWarps, 2) steps_kernel(const __grid_constant__ DirectTask task) {
  attend<kHead, kBf16, false>(task, 0);
}
template <int kHead, bool kBf16>
__global__ void __launch_bounds__(32 * kWarps, 2)
    steps_tiles_kernel(const __grid_constant__ DirectTask task, const int height) {
  attend<kHead, kBf16, true>(task, height);
}

}  // namespace dyno::ops::steps
