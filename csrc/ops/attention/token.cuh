// Attention of one token with norm, rotation and store, optimised for latency. Instructions bound such a launch, not
// the cache, which is in registers before the previous launch has ended. So it supports one token, one head size and
// one cache type. Products and layouts are as in direct.cuh.
//
// A warp computes each query row, and two more warps the new key and value, in shared memory in the reading order of
// the products. Then eight warps process the keys as in direct.cuh, and every thread adds four dimensions of a row.
//
// With clusters, the blocks of a cluster that have keys send their results for row r to block r of the cluster, whose
// barrier counts the bytes. So a cluster has at least as many blocks as rows. Results of several clusters, or of blocks
// without clusters, are parts that a launch of its own adds (add_parts.cuh).
#pragma once

#include "device/bulk_copy.cuh"
#include "device/cluster_shared.cuh"
#include "device/mbarrier.cuh"
#include "ops/attention/cluster_combine.cuh"

namespace dyno::ops::token {

using direct::kTileKeys;
using direct::kWarps;
inline constexpr int kRows = kTokenRows;
inline constexpr int kFreshWarps = 2;  // one for the new key, one for the new value
inline constexpr int kThreads = 32 * (kWarps + kFreshWarps);

static_assert(kRows <= kClusterBlocks, "each block of a cluster adds up one row");

// The parts of one row that the blocks of a cluster send.
template <int kHead>
struct Sent {
  float values[kClusterBlocks][kHead];
  float4 stats[kClusterBlocks];  // maximum in units of log2, sum
  uint64_t arrived;
};

template <int kHead>
struct Shared {
  static constexpr int kHalfPitch = kHead + 8, kPitch = kHead + 4;
  uint16_t queries[kRows][kHalfPitch];  // scaled, in the reading order of the products
  uint16_t fresh[2][kHalfPitch];        // the new key and value in the form of the cache
  float2 angles[kHead / 2];
  float2 stats[kWarps][kRows];  // maximum in units of log2, sum
  float merged[kWarps][kRows][kPitch];
};

// Loads 16 bytes from shared memory if `condition` holds. Written as a branch, it would move the array out of
// registers.
__device__ __forceinline__ void load_shared_if(bool condition, uint4& to, const uint16_t* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];\n}\n"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "r"(device::shared_address(from)), "r"(static_cast<uint32_t>(condition))
               : "memory");
}

// A warp's row: a query, the new key or the new value. Lane l has dimensions kPer·l … + kPer - 1.
template <int kHead, bool kBf16>
struct FreshRow {
  static constexpr int kPer = kHead / 32;
  const float* from = nullptr;  // null: no work
  uint16_t* to;                 // in shared memory
  uint8_t* cache = nullptr;
  bool normed = false, rotated = false, query;
  float factor = 1;
  int partner = 0;  // the lane with the other dimensions of the rotation
  float gain[kPer], cosine[kPer], sine[kPer];

  // `sine` has the sign that it has in the sum of a dimension.
  __device__ void prepare(const FreshRows& f, const float2* angles, const float* weights, int lane) {
    const int half = f.n_rot / 2, first = kPer * lane;
    partner = first < half ? lane + half / kPer : lane - half / kPer;
    if (!f.neox || first >= f.n_rot) partner = lane;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int dim = first + j;
      const bool inside = dim < f.n_rot, upper = f.neox ? dim >= half : dim % 2 == 1;
      const float2 c = inside ? angles[f.neox ? (upper ? dim - half : dim) : dim / 2] : make_float2(1, 0);
      cosine[j] = c.x, sine[j] = upper ? c.y : -c.y;
      gain[j] = weights != nullptr ? weights[dim] : 1.0f;
    }
  }
  __device__ void run(const FreshRows& f, int lane) const {
    float x[kPer];
    if constexpr (kPer == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + 4 * lane);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      const float2 v = *reinterpret_cast<const float2*>(from + 2 * lane);
      x[0] = v.x, x[1] = v.y;
    }
    if (normed) {
      float squares = 0;
#pragma unroll
      for (int j = 0; j < kPer; ++j) squares += x[j] * x[j];
      const float scale = rsqrtf(device::warp_sum(squares) * (1.0f / kHead) + f.eps);
#pragma unroll
      for (int j = 0; j < kPer; ++j) x[j] *= scale * gain[j];
    }
    if (rotated) {
      float other[kPer];
      if (f.neox) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) other[j] = __shfl_sync(device::kFullMask, x[j], partner);
      } else {
#pragma unroll
        for (int j = 0; j < kPer; ++j) other[j] = x[j ^ 1];
      }
#pragma unroll
      for (int j = 0; j < kPer; ++j) x[j] = x[j] * cosine[j] + other[j] * sine[j];
    }
    uint32_t packed[kPer / 2];
#pragma unroll
    for (int j = 0; j < kPer / 2; ++j) {
      const float low = x[2 * j] * factor, high = x[2 * j + 1] * factor;
      packed[j] = query ? device::pack2_finite<kBf16>(low, high) : device::pack2<kBf16>(low, high);
    }
    const auto put = [&](auto* at) {
      if constexpr (kPer == 4) {
        reinterpret_cast<uint2*>(at)[lane] = {packed[0], packed[1]};
      } else {
        reinterpret_cast<uint32_t*>(at)[lane] = packed[0];
      }
    };
    put(to);
    if (cache != nullptr) put(cache);
  }
};

// The parts of a key head.
template <bool kClusters>
struct TokenParts {
  static __device__ int of(const CudaAttention& t, const CudaTile& tile) {
    const int active = direct::block_keys(t, tile, 0).active;
    return kClusters ? (active + kClusterBlocks - 1) / kClusterBlocks : active;
  }
};

#if __CUDA_ARCH__ >= 900
// Adds a row over the blocks of a cluster, one of `clusters`; called by the first lanes of its block.
template <int kHead>
__device__ __forceinline__ void add_row(const CudaAttention& t, const CudaTile& tile, Sent<kHead>& sent, int row,
                                        int kv_head, int cluster, int members, int clusters) {
  const int lane = threadIdx.x, dim = 4 * lane;
  device::barrier_wait(device::shared_address(&sent.arrived), 0);
  if (dim >= kHead) return;
  parts::Sum sum;
  sum.add<kClusterBlocks>(
      members, [&](int b) { return make_float2(sent.stats[b].x, sent.stats[b].y); },
      [&](int b) { return *reinterpret_cast<const float4*>(sent.values[b] + dim); });
  if (clusters == 1) return sum.write(t, tile, row, kv_head, dim);
  const direct::Partials partials(t, kRows, kv_head);
  *reinterpret_cast<float4*>(partials.values + (int64_t{cluster} * kRows + row) * kHead + dim) = sum.value;
  if (lane == 0) partials.stats[cluster * kRows + row] = make_float2(sum.top, sum.total);
}
#endif

template <int kHead, bool kBf16, bool kClusters>
__global__ void __launch_bounds__(kThreads, 1) token_kernel(const __grid_constant__ DirectTask task) {
#if __CUDA_ARCH__ < 900
  if constexpr (kClusters) return;  // never launched
#endif
  constexpr int kKeyChunks = kHead / 32, kValueChunks = kHead / 64;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<Shared<kHead>*>(raw);
  device::let_next_start();
  const CudaAttention& t = task.common;
  const FreshRows& f = task.fresh;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, quad = lane % 4;
  const int kv_head = blockIdx.y, split = blockIdx.z;
  // The run, and rows of earlier tokens, do not depend on launches that are still running.
  CudaTile tile;
  tile.run = t.args.runs[0];
  const int position = tile.run.position;
  tile.row_end = t.group;
  tile.key_begin = t.windowed ? max(0, position - t.args.window + 1) : 0;
  tile.key_end = position + 1;
  const KeyRange range = direct::block_keys(t, tile, split);
  const bool whole = range.active == 1;
  const int cluster = split / kClusterBlocks;
  [[maybe_unused]] const int rank = split % kClusterBlocks;
  const int members = min(kClusterBlocks, range.active - cluster * kClusterBlocks);
  if (kClusters && !whole ? members <= 0 : split >= range.active) return;
#if __CUDA_ARCH__ >= 900
  [[maybe_unused]] auto& sent = *reinterpret_cast<Sent<kHead>*>(raw + sizeof(Shared<kHead>));
  if constexpr (kClusters) {
    if (!whole) {
      if (threadIdx.x == 0) {
        device::barrier_init(device::shared_address(&sent.arrived), 1);
        device::barrier_init_done();
      }
      device::cluster_arrive_relaxed();  // this block runs, and its barrier is initialised
    }
  }
#endif
  const bool has_fresh = range.begin <= position && range.end > position;  // its last key; only this block stores it

  const int start = range.begin + warp * kTileKeys;
  const bool works = warp < kWarps && start < range.end;
  const int settled = min(range.end, position);
  const uint32_t k_step = static_cast<uint32_t>(t.args.k_row_bytes), v_step = static_cast<uint32_t>(t.args.v_row_bytes);
  const uint8_t* key_at = key_rows(t, tile.run, kv_head) + (start + g) * t.args.k_row_bytes + 16 * quad;
  const uint8_t* value_at = value_rows(t, tile.run, kv_head) + (start + 2 * quad) * t.args.v_row_bytes + 16 * g;
  uint4 keys[kKeyChunks][2], values[kValueChunks][4];
  // Loads rows of the tile at `first`, which the pointers refer to; rows that are not settled become zeros.
  const auto load_keys = [&](int first) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool valid = first + g + 8 * h < settled;
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) {
        keys[c][h] = valid ? direct::load_16(key_at + 8 * h * k_step + 64 * c, true) : uint4{0, 0, 0, 0};
      }
    }
  };
  const auto load_values = [&](int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = (i & 1) + 8 * (i >> 1);
      const bool valid = first + 2 * quad + row < settled;
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        values[c][i] = valid ? direct::load_16(value_at + row * v_step + 128 * c, true) : uint4{0, 0, 0, 0};
      }
    }
  };
  if (task.early && works) load_keys(start), load_values(start);

  for (int i = static_cast<int>(threadIdx.x); i < f.n_rot / 2; i += kThreads) {
    shared.angles[i] = device::cos_sin(position, f.inv_freq[i], f.mscale);
  }
  FreshRow<kHead, kBf16> row;
  const float* weights = f.q_norm;  // of the norm
  row.query = warp < kWarps;
  if (row.query) {
    row.to = shared.queries[warp];
    if (warp < t.group) {
      row.from = t.args.q + int64_t{kv_head * t.group + warp} * kHead;
    } else {  // a column that is not stored
      for (int i = lane; i < Shared<kHead>::kHalfPitch; i += 32) row.to[i] = 0;
    }
    row.normed = f.norms_q, row.rotated = true, row.factor = t.query_scale();
  } else {
    const bool value = warp > kWarps;
    row.to = shared.fresh[value ? 1 : 0];
    if (has_fresh) {
      const int64_t cell = tile.run.slot * t.args.slot_positions + position;
      row.from = (value ? f.v : f.k) + kv_head * kHead;
      row.cache = value ? f.v_cache + cell * t.args.v_row_bytes + kv_head * t.v_head_bytes
                        : f.k_cache + cell * t.args.k_row_bytes + kv_head * t.k_head_bytes;
    }
    weights = value ? nullptr : f.k_norm;
    row.normed = value ? f.norms_v : f.norms_k, row.rotated = !value;
  }
  __syncthreads();  // the angles are written
  row.prepare(f, shared.angles, weights, lane);
#if __CUDA_ARCH__ >= 900
  if constexpr (kClusters) {
    if (!whole) {
      if (threadIdx.x == 0 && rank < t.group) {
        const auto bytes = static_cast<uint32_t>(members) * (kHead * 4 + 16);
        device::barrier_arrive_for_bytes(device::shared_address(&sent.arrived), bytes);
      }
      device::cluster_wait();  // all blocks of the cluster are running
    }
  }
#endif
  device::wait_for_previous();
  if (!task.early && works) load_keys(start), load_values(start);
  if (row.from != nullptr) row.run(f, lane);
  __syncthreads();  // queries and new rows are written

  if (works) {
    uint4 query[kKeyChunks];  // of row g, the dimensions for which this lane has the keys
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) {
      query[c] = *reinterpret_cast<const uint4*>(shared.queries[g] + 32 * c + 8 * quad);
    }
    float out[4 * kValueChunks][4] = {};
    float best[2] = {minus_infinity(), minus_infinity()}, total[2] = {};
#pragma unroll 1
    for (int first = start; first < range.end; first += kWarps * kTileKeys) {
      if (has_fresh && position - first < kTileKeys) {
#pragma unroll
        for (int c = 0; c < kKeyChunks; ++c) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            load_shared_if(first + g + 8 * h == position, keys[c][h], shared.fresh[0] + 32 * c + 8 * quad);
          }
        }
#pragma unroll
        for (int c = 0; c < kValueChunks; ++c) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = first + 2 * quad + (i & 1) + 8 * (i >> 1);
            load_shared_if(key == position, values[c][i], shared.fresh[1] + 64 * c + 8 * g);
          }
        }
      }
      // Two sums, so that a product waits only for every second product before it.
      float part[2][4] = {};
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) {
        const uint4 &low = keys[c][0], &high = keys[c][1];
        const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
        direct::mma<kBf16>(part[0], a[0], query[c].x, query[c].y);
        direct::mma<kBf16>(part[1], a[1], query[c].z, query[c].w);
      }
      const int next = first + kWarps * kTileKeys;
      key_at += kWarps * kTileKeys * t.args.k_row_bytes;
      if (next < range.end) load_keys(next);

      float scores[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool seen = first + g + 8 * (j >> 1) < range.end;
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
      if (next < range.end) load_values(next);
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
  const int query_row = static_cast<int>(threadIdx.x) / kQuads, dim = static_cast<int>(threadIdx.x) % kQuads * 4;
  if (query_row < t.group && range.begin < range.end) {
    const int warps = (range.end - range.begin + kTileKeys - 1) / kTileKeys;  // warps with keys; may exceed the number
                                                                              // of warps
    float2 stat[kWarps];
    float4 part[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const bool has = w < warps;
      stat[w] = has ? shared.stats[w][query_row] : make_float2(minus_infinity(), 0);
      part[w] = has ? *reinterpret_cast<const float4*>(shared.merged[w][query_row] + dim) : make_float4(0, 0, 0, 0);
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
    if (whole) {
      const float factor = output_factor(t, query_row, kv_head, top * direct::kLn2, sum);
      float* to = t.args.out + int64_t{kv_head * t.group + query_row} * kHead + dim;
      *reinterpret_cast<float4*>(to) = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    } else if constexpr (kClusters) {
#if __CUDA_ARCH__ >= 900
      const auto there = [&](const void* p) { return device::cluster_address(device::shared_address(p), query_row); };
      const uint32_t barrier = there(&sent.arrived);
      device::send_cluster_float4(there(sent.values[rank] + dim), v, barrier);
      if (dim == 0) device::send_cluster_float4(there(&sent.stats[rank]), make_float4(top, sum, 0, 0), barrier);
#endif
    } else {
      const direct::Partials parts(t, kRows, kv_head);
      *reinterpret_cast<float4*>(parts.values + (int64_t{split} * kRows + query_row) * kHead + dim) = v;
      if (dim == 0) parts.stats[split * kRows + query_row] = make_float2(top, sum);
    }
  }
#if __CUDA_ARCH__ >= 900
  if constexpr (kClusters) {
    if (!whole && rank < t.group && warp == 0) {  // the row that this block adds
      const int clusters = (range.active + kClusterBlocks - 1) / kClusterBlocks;
      add_row(t, tile, sent, rank, kv_head, cluster, members, clusters);
    }
  }
#endif
}

}  // namespace dyno::ops::token
