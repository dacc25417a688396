// The state of linear attention in the registers of a block: 32 columns of one head, processed token by token.
#pragma once

#include <cuda_runtime.h>

#include "device/reduce.cuh"
#include "ops/linear_attention/linear_attention.h"

namespace dyno::ops::linear {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kColumns = 32;  // per block

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ __forceinline__ bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Four columns of a row of `width`, starting at `at`; columns beyond the width are 0.
__device__ __forceinline__ float4 load_four(const float* row, int at, int width) {
  if (at + 4 <= width && aligned(row + at)) return *reinterpret_cast<const float4*>(row + at);
  return make_float4(at < width ? row[at] : 0.0f, at + 1 < width ? row[at + 1] : 0.0f,
                     at + 2 < width ? row[at + 2] : 0.0f, at + 3 < width ? row[at + 3] : 0.0f);
}

__device__ __forceinline__ void store_four(float* row, int at, int width, const float4& value) {
  if (at + 4 <= width && aligned(row + at)) {
    *reinterpret_cast<float4*>(row + at) = value;
    return;
  }
  if (at < width) row[at] = value.x;
  if (at + 1 < width) row[at + 1] = value.y;
  if (at + 2 < width) row[at + 2] = value.z;
  if (at + 3 < width) row[at + 3] = value.w;
}

__device__ __forceinline__ void add_scaled(float4& sum, float factor, const float4& value) {
  sum.x += factor * value.x, sum.y += factor * value.y, sum.z += factor * value.z, sum.w += factor * value.w;
}

// One value head of one run, and the columns of a block.
struct Head {
  const LinearAttentionArgs& args;
  const LinearAttentionDesc& d;
  int dk, dv, head, key_head, first_column;
  bool delta;

  __device__ Head(const LinearAttentionArgs& all, const LinearAttentionDesc& desc, int number, int column)
      : args(all),
        d(desc),
        dk(static_cast<int>(desc.dk)),
        dv(static_cast<int>(desc.dv)),
        head(number),
        key_head(static_cast<int>(desc.grouped ? number / (desc.v_heads / desc.k_heads) : number % desc.k_heads)),
        first_column(column),
        delta(desc.rule == LinearRule::delta) {}

  __device__ const float* q(int64_t token) const { return args.q + token * args.q_stride + int64_t{key_head} * dk; }
  __device__ const float* k(int64_t token) const { return args.k + token * args.k_stride + int64_t{key_head} * dk; }
  __device__ const float* v(int64_t token) const { return args.v + token * args.v_stride + int64_t{head} * dv; }
  __device__ float* out(int64_t token) const { return args.out + token * args.out_stride + int64_t{head} * dv; }
  __device__ float* state(int slot) const { return args.state + (int64_t{slot} * d.v_heads + head) * dk * dv; }

  // softplus(step + bias) of row `i`, or of all rows.
  __device__ float step(int64_t token, int i = 0) const {
    const int64_t steps = d.channel_decay ? dk : 1;
    return softplus(args.step[token * args.step_stride + head * steps + i] + args.step_bias[head * steps + i]);
  }
  // The factor of u.
  __device__ float factor(int64_t token) const {
    return delta ? 1.0f / (1.0f + expf(-args.beta[token * args.beta_stride + head])) : step(token);
  }
  // The factor of a row of q or k; `squares` is the sum of squares of the row.
  __device__ float key_scale(float squares) const { return delta ? 1.0f / sqrtf(squares + args.eps) : 1.0f; }
  __device__ float query_scale(float squares) const {
    return delta ? key_scale(squares) / sqrtf(static_cast<float>(dk)) : 1.0f;
  }
};

// A thread has kRows consecutive rows of four columns; eight threads are adjacent.
template <int kDk>
struct StateTile {
  static constexpr int kRows = kDk / (kThreads / 8);
  float4 s[kRows];

  __device__ static int row() { return static_cast<int>(threadIdx.x) / 8 * kRows; }
  __device__ static int column() { return static_cast<int>(threadIdx.x) % 8 * 4; }

  __device__ void load(const Head& head, const SequenceRun& run) {
    const float* kept = head.state(run.slot);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool there = run.position != 0 && row() + i < head.dk;
      s[i] = there ? load_four(kept + int64_t{row() + i} * head.dv, head.first_column + column(), head.dv)
                   : make_float4(0, 0, 0, 0);
    }
  }

  __device__ void store(const Head& head, const SequenceRun& run) const {
    float* kept = head.state(run.slot);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row() + i < head.dk) {
        store_four(kept + int64_t{row() + i} * head.dv, head.first_column + column(), head.dv, s[i]);
      }
    }
  }
};

// Floats of shared memory that tokens() needs.
template <int kDk>
inline constexpr int kTokenFloats = 3 * kDk + 2 * kWarps * kColumns;

// Sums over the rows of a warp's threads, and writes the result for sum_warps().
__device__ __forceinline__ void sum_rows(float4 value, float* parts) {
#pragma unroll
  for (int offset = 8; offset < 32; offset *= 2) {
    value.x += __shfl_xor_sync(device::kFullMask, value.x, offset);
    value.y += __shfl_xor_sync(device::kFullMask, value.y, offset);
    value.z += __shfl_xor_sync(device::kFullMask, value.z, offset);
    value.w += __shfl_xor_sync(device::kFullMask, value.w, offset);
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane < 8) reinterpret_cast<float4*>(parts)[warp * 8 + lane] = value;
}

__device__ __forceinline__ float4 sum_warps(const float* parts) {
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    add_scaled(sum, 1.0f, reinterpret_cast<const float4*>(parts)[warp * 8 + threadIdx.x % 8]);
  }
  return sum;
}

// Processes `count` tokens in order, starting at `first`. `memory` has kTokenFloats, and no thread may still read it.
template <int kDk>
__device__ void tokens(const Head& head, int64_t first, int count, StateTile<kDk>& tile, float* memory) {
  float* q = memory;            // [kDk]
  float* k = q + kDk;           // [kDk]
  float* decays = k + kDk;      // [kDk]
  float* known = decays + kDk;  // [kWarps, kColumns]
  float* sums = known + kWarps * kColumns;
  const int lane = threadIdx.x % 32, row = tile.row(), column = head.first_column + tile.column();
  for (int64_t t = first; t < first + count; ++t) {
    const float *q_row = head.q(t), *k_row = head.k(t);
    // Every warp computes the norms, so that no warp waits for another.
    float q_squares = 0, k_squares = 0;
    for (int i = lane; i < head.dk; i += 32) {
      q_squares += q_row[i] * q_row[i];
      k_squares += k_row[i] * k_row[i];
    }
    const float q_scale = head.query_scale(device::warp_sum(q_squares));
    const float k_scale = head.key_scale(device::warp_sum(k_squares));
    const float rate = head.args.decay[head.head];
    for (int i = threadIdx.x; i < kDk; i += kThreads) {
      const bool inside = i < head.dk;
      q[i] = inside ? q_row[i] * q_scale : 0.0f;
      k[i] = inside ? k_row[i] * k_scale : 0.0f;
      if (head.d.channel_decay) decays[i] = inside ? expf(rate * head.step(t, i)) : 0.0f;
    }
    const float decay = head.d.channel_decay ? 0.0f : expf(rate * head.step(t));
    const float4 v = load_four(head.v(t), column, head.dv);
    const float factor = head.factor(t);
    __syncthreads();  // q, k and decays are written
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < tile.kRows; ++i) {
      const float by = head.d.channel_decay ? decays[row + i] : decay;
      tile.s[i] = make_float4(by * tile.s[i].x, by * tile.s[i].y, by * tile.s[i].z, by * tile.s[i].w);
      add_scaled(sum, k[row + i], tile.s[i]);
    }
    float4 u = v;
    if (head.delta) {
      sum_rows(sum, known);
      __syncthreads();  // the parts of all warps are written
      add_scaled(u, -1.0f, sum_warps(known));
    }
    u = make_float4(factor * u.x, factor * u.y, factor * u.z, factor * u.w);
    sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < tile.kRows; ++i) {
      add_scaled(tile.s[i], k[row + i], u);
      add_scaled(sum, q[row + i], tile.s[i]);
    }
    sum_rows(sum, sums);
    __syncthreads();  // q, k and decays have been read, and the parts are written
    if (threadIdx.x < 8) {
      sum = sum_warps(sums);
      if (!head.delta) add_scaled(sum, head.args.skip[head.head], v);
      store_four(head.out(t), column, head.dv, sum);
    }
  }
}

}  // namespace dyno::ops::linear
