// Reads rows of the KV cache as f32, for kernel sources.
#pragma once

#include "ops/attention/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {

constexpr int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// load_cache<T>(row, d): elements [d, d + kLanes) of the row at `row`.
template <CacheType T>
DYNO_INLINE vf load_cache(const std::byte* row, int64_t d) {
  if constexpr (T == CacheType::f32) {
    return load(reinterpret_cast<const float*>(row) + d);
  } else if constexpr (T == CacheType::f16) {
    return widen_f16(*reinterpret_cast<const vh_unaligned*>(row + 2 * d));
  } else if constexpr (T == CacheType::bf16) {
    return widen_bf16(*reinterpret_cast<const vh_unaligned*>(row + 2 * d));
  } else {
    const std::byte* block = row + d / 32 * 34;
    uint16_t half;
    __builtin_memcpy(&half, block, 2);
    const vb q = *reinterpret_cast<const vb_unaligned*>(block + 2 + d % 32);
    return widen_i8(q) * broadcast_f16(half);
  }
}

// load_cache_step<T>(row, d, out): the vectors from element d on that share a scale, or one vector; d must be a
// multiple of their elements.
template <CacheType T>
constexpr int kCacheStep = T == CacheType::q8_0 ? 32 / kLanes : 1;

template <CacheType T, int N>
DYNO_INLINE void load_cache_step(const std::byte* row, int64_t d, vf (&out)[N]) {
  static_assert(kCacheStep<T> % N == 0);
  if constexpr (T == CacheType::q8_0) {
    const std::byte* block = row + d / 32 * 34;
    uint16_t half;
    __builtin_memcpy(&half, block, 2);
    const vf scale = broadcast_f16(half);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      out[i] = widen_i8(*reinterpret_cast<const vb_unaligned*>(block + 2 + d % 32 + i * kLanes)) * scale;
    }
  } else {
    out[0] = load_cache<T>(row, d);
  }
}

// The first `count` < kLanes of them, then zeros; reads nothing past the row.
template <CacheType T>
DYNO_INLINE vf load_cache_tail(const std::byte* row, int64_t d, int64_t count) {
  if constexpr (T == CacheType::q8_0) {
    return load_cache<T>(row, d);  // rows consist of whole blocks, so there is no tail
  } else {
    constexpr int64_t kSize = T == CacheType::f32 ? 4 : 2;
    alignas(64) std::byte part[kLanes * kSize] = {};
    __builtin_memcpy(part, row + d * kSize, static_cast<size_t>(count * kSize));
    return load_cache<T>(part, 0);
  }
}

// Converts a row of `n` elements to f32, zero-padded to whole vectors.
template <CacheType T>
DYNO_INLINE void widen_row(const std::byte* row, float* out, int64_t n) {
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) store(out + d, load_cache<T>(row, d));
  if (d < n) store(out + d, load_cache_tail<T>(row, d, n - d));
}

// The last step of a score: cap * tanh(score / cap); `score` is already divided by the cap.
DYNO_INLINE vf apply_softcap(vf score, float cap) { return broadcast(cap) * tanh(score); }

DYNO_INLINE const std::byte* key_row(const AttentionTask& task, int64_t position) {
  const AttentionArgs& a = *task.args;
  return a.k_cache + (task.run.slot * a.slot_positions + position) * a.k_row_bytes + task.kv_head * task.k_head_bytes;
}
DYNO_INLINE const std::byte* value_row(const AttentionTask& task, int64_t position) {
  if (task.v_in_k) return key_row(task, position);
  const AttentionArgs& a = *task.args;
  return a.v_cache + (task.run.slot * a.slot_positions + position) * a.v_row_bytes + task.kv_head * task.v_head_bytes;
}
DYNO_INLINE const float* query_row(const AttentionTask& task, int64_t row) {
  const int64_t token = task.run.first_token + row / task.group;
  return task.args->q + token * task.args->q_stride + (task.kv_head * task.group + row % task.group) * task.dk;
}
DYNO_INLINE float* output_row(const AttentionTask& task, int64_t row) {
  const int64_t token = task.run.first_token + row / task.group;
  return task.args->out + token * task.args->out_stride + (task.kv_head * task.group + row % task.group) * task.dv;
}
DYNO_INLINE int64_t row_position(const AttentionTask& task, int64_t row) {
  return task.run.position + row / task.group;
}
// The factor of queries: the scale, divided by the cap if there is one.
DYNO_INLINE float query_scale(const AttentionTask& task) {
  return task.softcap ? task.args->scale / task.args->softcap : task.args->scale;
}
DYNO_INLINE float row_sink(const AttentionTask& task, int64_t row) {
  return task.args->sinks[task.kv_head * task.group + row % task.group];
}

DYNO_INLINE float exp_one(float x) { return exp(broadcast(x))[0]; }

// out = sum / total over dv elements; the sink is added to the denominator.
DYNO_INLINE void write_output(const AttentionTask& task, int64_t row, const float* sum, float best, float total) {
  float factor = 1.0f / total;
  if (task.sinks) {
    const float sink = row_sink(task, row);
    const float top = sink > best ? sink : best;
    const float shrink = exp_one(best - top);
    factor = shrink / (total * shrink + exp_one(sink - top));
  }
  float* out = output_row(task, row);
  int64_t d = 0;
  for (; d + kLanes <= task.dv; d += kLanes) store(out + d, load(sum + d) * broadcast(factor));
  for (; d < task.dv; ++d) out[d] = sum[d] * factor;
}

}  // namespace DYNO_KERNEL_NAMESPACE
