// Attention of a few query rows over a part of the keys, read from the cache as they lie: dot products of a key with
// all rows while it is in registers, then the online softmax, then the weighted values.
#include "ops/attention/cache_load.h"
#include "ops/attention/row_sums.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

constexpr float kMasked = -__builtin_inff();

// Rows of the cache that are wanted soon. Heads lie apart from each other by all heads of a position, too far for the
// processor's own prefetchers, so each half of a block asks for the rows of the next half.
struct Ahead {
  const std::byte* row = nullptr;  // nullptr: nothing to ask for
  int64_t stride = 0;
  int64_t bytes = 0;
  int64_t count = 0;

  DYNO_INLINE void fetch(int64_t j) const {
    if (row == nullptr || j >= count) return;
    const std::byte* const begin = row + j * stride;
    const std::byte* line = begin - reinterpret_cast<uintptr_t>(begin) % 64;
    for (; line < begin + bytes; line += 64) __builtin_prefetch(line, 0, 3);
  }
};

// scores[i][j] for R rows and K keys from `key` on.
template <CacheType T, int R, int K>
DYNO_INLINE void dot_tile(const float* queries, int64_t query_stride, const std::byte* key, int64_t key_stride,
                          int64_t dk, float* scores) {
  constexpr int N = kCacheStep<T>;
  vf acc[R][K] = {};
  int64_t d = 0;
  for (; d + N * kLanes <= dk; d += N * kLanes) {
#pragma GCC unroll 16
    for (int j = 0; j < K; ++j) {
      vf k[N];
      load_cache_step<T>(key + j * key_stride, d, k);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) acc[i][j] += load(queries + i * query_stride + d + n * kLanes) * k[n];
      }
    }
  }
  if (d < dk) {
    for (int j = 0; j < K; ++j) {
      const vf k = load_cache_tail<T>(key + j * key_stride, d, dk - d);
      for (int i = 0; i < R; ++i) acc[i][j] += load(queries + i * query_stride + d) * k;
    }
  }
  if constexpr (R * K == kSums) {
    vf sums[kSums];
#pragma GCC unroll 16
    for (int n = 0; n < kSums; ++n) sums[sum_slot(n)] = acc[n / K][n % K];
    float out[kSums];
    horizontal_sums(sums, out);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) __builtin_memcpy(scores + i * kDecodeKeys, out + i * K, K * sizeof(float));
  } else {
    for (int i = 0; i < R; ++i) {
      for (int j = 0; j < K; ++j) scores[i * kDecodeKeys + j] = horizontal_sum(acc[i][j]);
    }
  }
}

template <CacheType T, int R>
void dot_rows(const float* queries, int64_t query_stride, const std::byte* key, int64_t key_stride, int64_t dk,
              int64_t count, const Ahead& ahead, float* scores) {
  constexpr int K = kSums / R;
  int64_t j = 0;
  for (; j + K <= count; j += K) {
    for (int i = 0; i < K; ++i) ahead.fetch(j + i);
    dot_tile<T, R, K>(queries, query_stride, key + j * key_stride, key_stride, dk, scores + j);
  }
  for (; j < count; ++j) {
    ahead.fetch(j);
    dot_tile<T, R, 1>(queries, query_stride, key + j * key_stride, key_stride, dk, scores + j);
  }
}

// sums[i][0, V vectors) += sum over j of weights[i][j] * value[j], for R rows from dimension d on.
template <CacheType T, int R, int V>
DYNO_INLINE void value_tile(const float* weights, const std::byte* value, int64_t value_stride, int64_t d,
                            int64_t count, const Ahead& ahead, float* sums, int64_t sum_stride) {
  constexpr int N = kCacheStep<T> < V ? kCacheStep<T> : V;
  vf acc[R][V];
  for (int i = 0; i < R; ++i) {
    for (int v = 0; v < V; ++v) acc[i][v] = load(sums + i * sum_stride + d + v * kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    ahead.fetch(j);
#pragma GCC unroll 8
    for (int v = 0; v < V; v += N) {
      vf x[N];
      load_cache_step<T>(value + j * value_stride, d + v * kLanes, x);
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        const vf w = broadcast(weights[i * kDecodeKeys + j]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[i][v + n] += w * x[n];
      }
    }
  }
  for (int i = 0; i < R; ++i) {
    for (int v = 0; v < V; ++v) store(sums + i * sum_stride + d + v * kLanes, acc[i][v]);
  }
}

template <CacheType T, int R>
void value_rows(const float* weights, const std::byte* value, int64_t value_stride, int64_t dv, int64_t count,
                const Ahead& ahead, float* sums, int64_t sum_stride) {
  constexpr int kWide = kSums / R < 8 ? kSums / R : 8;
  constexpr Ahead kNothing;
  int64_t d = 0;
  const auto step = [&]<int V>() {
    for (; d + V * kLanes <= dv; d += V * kLanes) {
      value_tile<T, R, V>(weights, value, value_stride, d, count, d == 0 ? ahead : kNothing, sums, sum_stride);
    }
  };
  step.template operator()<kWide>();
  step.template operator()<2>();
  step.template operator()<1>();
  if (d == dv) return;
  for (int64_t j = 0; j < count; ++j) {
    const vf x = load_cache_tail<T>(value + j * value_stride, d, dv - d);
    for (int i = 0; i < R; ++i) {
      float* sum = sums + i * sum_stride + d;
      store(sum, load(sum) + broadcast(weights[i * kDecodeKeys + j]) * x);
    }
  }
}

template <CacheType T>
void dot_block(const float* queries, int64_t query_stride, const std::byte* key, int64_t key_stride, int64_t dk,
               int64_t count, int64_t rows, Ahead ahead, float* scores) {
  int64_t i = 0;
  const auto step = [&]<int R>() {
    for (; i + R <= rows; i += R) {
      dot_rows<T, R>(queries + i * query_stride, query_stride, key, key_stride, dk, count, ahead,
                     scores + i * kDecodeKeys);
      ahead = {};
    }
  };
  step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

template <CacheType T>
void value_block(const float* weights, const std::byte* value, int64_t value_stride, int64_t dv, int64_t count,
                 int64_t rows, Ahead ahead, float* sums, int64_t sum_stride) {
  int64_t i = 0;
  const auto step = [&]<int R>() {
    for (; i + R <= rows; i += R) {
      value_rows<T, R>(weights + i * kDecodeKeys, value, value_stride, dv, count, ahead, sums + i * sum_stride,
                       sum_stride);
      ahead = {};
    }
  };
  step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

// One row's scores of a block become weights; its running maximum, total and sum are brought up to date.
void softmax_row(const AttentionTask& task, int64_t position, int64_t first_key, int64_t count, float* scores,
                 float* partial) {
  if (task.softcap) {
    for (int64_t j = 0; j < kDecodeKeys; j += kLanes) {
      store(scores + j, apply_softcap(load(scores + j), task.args->softcap));
    }
  }
  const int64_t last = position - first_key + 1;
  const int64_t end = last < count ? last : count;
  const int64_t start = task.windowed ? position - task.args->window + 1 - first_key : 0;
  for (int64_t j = 0; j < start && j < kDecodeKeys; ++j) scores[j] = kMasked;
  for (int64_t j = end > 0 ? end : 0; j < kDecodeKeys; ++j) scores[j] = kMasked;
  vf top = broadcast(kMasked);
  for (int64_t j = 0; j < kDecodeKeys; j += kLanes) top = max(top, load(scores + j));
  const float block_best = horizontal_max(top);
  const float old = partial[0];
  const float best = old > block_best ? old : block_best;
  const float base = best == kMasked ? 0.0f : best;
  vf sum = {};
  for (int64_t j = 0; j < kDecodeKeys; j += kLanes) {
    const vf weight = exp(load(scores + j) - broadcast(base));
    sum += weight;
    store(scores + j, weight);
  }
  const float shrink = exp_one(old - base);
  partial[0] = best;
  partial[1] = partial[1] * shrink + horizontal_sum(sum);
  if (shrink == 1.0f) return;
  float* sums = partial + kPartialHead;
  for (int64_t d = 0; d < task.dv; d += kLanes) store(sums + d, load(sums + d) * broadcast(shrink));
}

template <typename Body>
DYNO_INLINE void with_type(CacheType type, const Body& body) {
  switch (type) {
    case CacheType::f32:
      return body.template operator()<CacheType::f32>();
    case CacheType::f16:
      return body.template operator()<CacheType::f16>();
    case CacheType::bf16:
      return body.template operator()<CacheType::bf16>();
    case CacheType::q8_0:
      return body.template operator()<CacheType::q8_0>();
  }
}

}  // namespace

void attention_decode(const AttentionTask& task, float* scratch, float* partial, int64_t row_stride) {
  const int64_t rows = task.row_end - task.row_begin;
  const int64_t dk_pad = round_up(task.dk, 16);
  float* queries = scratch;
  float* scores = scratch + kDecodeRows * dk_pad;
  const float scale = query_scale(task);
  for (int64_t i = 0; i < rows; ++i) {
    const float* q = query_row(task, task.row_begin + i);
    for (int64_t d = 0; d < dk_pad; ++d) queries[i * dk_pad + d] = d < task.dk ? q[d] * scale : 0.0f;
    if (task.resumed) continue;
    float* out = partial + i * row_stride;
    __builtin_memset(out, 0, static_cast<size_t>(kPartialHead + round_up(task.dv, 16)) * sizeof(float));
    out[0] = kMasked;
  }
  const int64_t key_stride = task.args->k_row_bytes;
  const int64_t value_stride = task.v_in_k ? key_stride : task.args->v_row_bytes;
  for (int64_t key = task.key_begin; key < task.key_end; key += kDecodeKeys) {
    const int64_t count = task.key_end - key < kDecodeKeys ? task.key_end - key : kDecodeKeys;
    const int64_t next = key + kDecodeKeys, left = task.key_end - next;
    const Ahead keys = left <= 0 ? Ahead{} : Ahead{key_row(task, next), key_stride, task.k_head_bytes, left};
    const Ahead values = task.v_in_k ? Ahead{} : Ahead{value_row(task, key), value_stride, task.v_head_bytes, count};
    with_type(task.k_type, [&]<CacheType T>() {
      dot_block<T>(queries, dk_pad, key_row(task, key), key_stride, task.dk, count, rows, values, scores);
    });
    for (int64_t i = 0; i < rows; ++i) {
      softmax_row(task, row_position(task, task.row_begin + i), key, count, scores + i * kDecodeKeys,
                  partial + i * row_stride);
    }
    with_type(task.v_in_k ? task.k_type : task.v_type, [&]<CacheType T>() {
      value_block<T>(scores, value_row(task, key), value_stride, task.dv, count, rows, keys, partial + kPartialHead,
                     row_stride);
    });
  }
}

void attention_combine(const AttentionTask& task, int64_t row, const float* partial, int64_t part_stride, int64_t parts,
                       float* scratch) {
  float best = kMasked;
  for (int64_t p = 0; p < parts; ++p) best = partial[p * part_stride] > best ? partial[p * part_stride] : best;
  float total = 0;
  __builtin_memset(scratch, 0, static_cast<size_t>(round_up(task.dv, 16)) * sizeof(float));
  for (int64_t p = 0; p < parts; ++p) {
    const float* part = partial + p * part_stride;
    const float weight = exp_one(part[0] - best);
    total += part[1] * weight;
    for (int64_t d = 0; d < task.dv; d += kLanes) {
      store(scratch + d, load(scratch + d) + load(part + kPartialHead + d) * broadcast(weight));
    }
  }
  write_output(task, row, scratch, best, total);
}

}  // namespace DYNO_KERNEL_NAMESPACE
