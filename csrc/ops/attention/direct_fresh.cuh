// Computes the new rows that a block of direct attention needs (fresh.cuh) in shared memory: queries as floats, keys
// and values in the form of the cache.
#pragma once

#include "ops/attention/fresh.cuh"

namespace dyno::ops::direct {

using device::Scalar;

// Additional shared memory of the fused kernels, after the common part.
template <int kHead, int kRows>
struct FreshMemory {
  static constexpr int kPitch = kHead + 4, kRowBytes = 2 * kHead + 16;
  float queries[kRows][kPitch];
  float keys[kDirectWarps][kPitch];                     // per warp
  uint8_t stored[2][kFusedAttentionTokens][kRowBytes];  // keys and values in the form of the cache
  float2 angles[kFusedAttentionTokens * kHead / 2];
};

// Computes the queries of the tile, and the new rows among the block's keys: a warp per row, two at a time.
template <int kHead, Scalar kType, int kRows>
struct FreshWork {
  static constexpr int kPer = kHead / 32;
  const CudaAttention& t;
  const FreshRows& f;
  const CudaTile& tile;
  const FreshKeys& fresh;
  FreshMemory<kHead, kRows>& memory;
  int kv_head, lane, warp;
  float q_weight[kPer], k_weight[kPer];

  // The part that depends on no earlier launch.
  __device__ void prepare() {
    fill_angles(f, tile.run.position, tile_tokens(t, tile), memory.angles);
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int i = lane + 32 * j;
      q_weight[j] = f.q_norm != nullptr && i < t.dk ? f.q_norm[i] : 1.0f;
      k_weight[j] = f.k_norm != nullptr && i < t.dk ? f.k_norm[i] : 1.0f;
    }
  }
  __device__ const float* source(int item) const {
    if (item < tile.rows()) return query_row(t, tile, tile.row_begin + item, kv_head);
    const int at = item - tile.rows(), token = tile.run.first_token + fresh.first + at % fresh.count;
    if (at < fresh.count) return f.k + token * f.k_stride + kv_head * t.dk;
    return f.v + token * f.v_stride + kv_head * t.dv;
  }
  __device__ void store(const float (&x)[kPer], int width, int at, bool value) {
    const int token = fresh.first + at;
    uint8_t* shared = memory.stored[value ? 1 : 0][at];
    const bool write = stores(t, tile, token);
    const int64_t cell = fresh_cell(t, tile, token);
    uint8_t* cache = value ? f.v_cache + cell * t.args.v_row_bytes + kv_head * t.v_head_bytes
                           : f.k_cache + cell * t.args.k_row_bytes + kv_head * t.k_head_bytes;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      if (32 * j >= width) break;
      const int i = lane + 32 * j;
      if (kType != Scalar::q8_0 && i >= width)
        break;  // q8_0 rows consist of whole blocks, which a warp writes
                // together
      device::store_scalar(kType, x[j], shared, i, lane);
      if (write) device::store_scalar(kType, x[j], cache, i, lane);
    }
  }
  __device__ void finish(int item, float (&x)[kPer]) {
    const int at = item - tile.rows();
    if (at >= fresh.count) {
      if (f.norms_v) {
        const float scale = norm_scale(x, t.dv, f.eps, lane);
#pragma unroll
        for (int j = 0; j < kPer; ++j) x[j] *= scale;
      }
      return store(x, t.dv, at - fresh.count, true);
    }
    const bool query = at < 0;
    if (query ? f.norms_q : f.norms_k) {
      const float scale = norm_scale(x, t.dk, f.eps, lane);
#pragma unroll
      for (int j = 0; j < kPer; ++j) x[j] = x[j] * scale * (query ? q_weight[j] : k_weight[j]);
    }
    float* row = query ? memory.queries[item] : memory.keys[warp];
    const int token = query ? (tile.row_begin + item) / t.group : fresh.first + at;
#pragma unroll
    for (int j = 0; j < kPer; ++j) row[lane + 32 * j] = x[j];
    __syncwarp();  // the row is written; the elements of a pair are in different lanes
    rotate_row(f, row, memory.angles + token * (f.n_rot / 2), lane);
    __syncwarp();  // the pairs are rotated
    if (query) return;
#pragma unroll
    for (int j = 0; j < kPer; ++j) x[j] = row[lane + 32 * j];
    store(x, t.dk, at, false);
    __syncwarp();  // the row is read before the next one is written
  }
  __device__ void run() {
    const int items = tile.rows() + 2 * fresh.count;
    for (int base = warp; base < items; base += 2 * kDirectWarps) {
      float x[2][kPer];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int item = base + u * kDirectWarps;
        const int width = item - tile.rows() < fresh.count ? t.dk : t.dv;
        const float* from = item < items ? source(item) : nullptr;
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
          const int i = lane + 32 * j;
          x[u][j] = from != nullptr && i < width ? from[i] : 0.0f;
        }
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        if (base + u * kDirectWarps < items) finish(base + u * kDirectWarps, x[u]);
      }
    }
  }
};

}  // namespace dyno::ops::direct
