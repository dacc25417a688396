// Attention of a few query rows over a part of the keys, read directly from the cache: dot products of a key with all
// rows while it is in registers, then the online softmax, then the weighted values.
#include "ops/attention/cache_load.h"
#include "ops/attention/row_sums.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

constexpr float kMasked = -__builtin_inff();

// Keys that all heads of a task process before the next ones. The same number is being prefetched, so both fit into the
// second-level cache of any processor.
constexpr int64_t kTileKeys = 32;

// The rows that a task reads, in the order of their addresses: keys of a block, its values, keys of the next block. The
// heads of a position are adjacent, so a thread that processes them all reads whole pages. Prefetches in this order
// form a stream that the hardware prefetchers follow; the products jump from key to key.
class Ahead {
 public:
  explicit Ahead(const AttentionTask& task) : task_(&task), key_(task.key_begin), row_(kTileKeys) { enter(); }

  // Prefetches the next `bytes`.
  DYNO_INLINE void fetch(int64_t bytes) {
    at_ += static_cast<uintptr_t>(bytes);
    if (at_ > end_) return next();
    ask(at_);
  }

 private:
  const AttentionTask* task_;
  uintptr_t line_ = 0, at_ = 0, end_ = 0;  // the next line, the next byte, the end of the row
  int64_t key_, row_;                      // the block, and the row in it
  bool values_ = false;

  // Only into the second-level cache: the first one is too small, and its few fill buffers would wait for memory.
  DYNO_INLINE void ask(uintptr_t end) {
    for (; line_ < end; line_ += 64) __builtin_prefetch(reinterpret_cast<const void*>(line_), 0, 2);
  }

  // Moves to row `row_` of the block or, if it does not exist, to the next row.
  void enter() {
    const AttentionTask& task = *task_;
    for (; key_ < task.key_end; row_ = 0) {
      const int64_t left = task.key_end - key_, count = left < kDecodeKeys ? left : kDecodeKeys;
      if (row_ < count) {
        const int64_t stride = values_ ? task.args->v_row_bytes : task.args->k_row_bytes;
        const int64_t bytes = task.kv_heads * (values_ ? task.v_head_bytes : task.k_head_bytes);
        const std::byte* row = values_ ? value_row(task, key_ + row_) : key_row(task, key_ + row_);
        const bool whole = bytes == stride;  // rows are contiguous
        at_ = reinterpret_cast<uintptr_t>(row);
        line_ = at_ / 64 * 64;
        end_ = at_ + static_cast<uintptr_t>(whole ? (count - row_) * stride : bytes);
        row_ = whole ? count : row_ + 1;
        return;
      }
      if (values_ || task.v_in_k) key_ += kDecodeKeys;
      values_ = !values_ && !task.v_in_k;
    }
    at_ = 0;  // the end
    line_ = end_ = UINTPTR_MAX;
  }

  [[gnu::noinline]] void next() {
    for (;;) {
      const uintptr_t beyond = at_ - end_;
      ask(end_);
      enter();
      if (end_ == UINTPTR_MAX) return;
      at_ += beyond;
      if (at_ <= end_) break;
    }
    ask(at_);
  }
};

// scores[i][j] for R rows and K keys, starting at `key`.
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
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) acc[i][j] += load(queries + i * query_stride + d + n * kLanes) * k[n];
      }
    }
  }
  if (d < dk) {  // unrolled too, because accumulators with a variable index would be on the stack
#pragma GCC unroll 16
    for (int j = 0; j < K; ++j) {
      const vf k = load_cache_tail<T>(key + j * key_stride, d, dk - d);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) acc[i][j] += load(queries + i * query_stride + d) * k;
    }
  }
  if constexpr (R * K == kSums) {
    vf sums[kSums];
#pragma GCC unroll 16
    for (int n = 0; n < kSums; ++n) sums[sum_slot(n)] = acc[n / K][n % K];
    float out[kSums];
    horizontal_sums(sums, out);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) __builtin_memcpy(scores + i * kDecodeKeys, out + i * K, K * sizeof(float));
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 16
      for (int j = 0; j < K; ++j) scores[i * kDecodeKeys + j] = horizontal_sum(acc[i][j]);
    }
  }
}

template <CacheType T, int R>
void dot_rows(const float* queries, int64_t query_stride, const std::byte* key, int64_t key_stride, int64_t dk,
              int64_t count, Ahead& ahead, int64_t bytes, float* scores) {
  constexpr int K = kSums / R;
  int64_t j = 0;
  for (; j + K <= count; j += K) {
    ahead.fetch(K * bytes);
    dot_tile<T, R, K>(queries, query_stride, key + j * key_stride, key_stride, dk, scores + j);
  }
  for (; j < count; ++j) {
    ahead.fetch(bytes);
    dot_tile<T, R, 1>(queries, query_stride, key + j * key_stride, key_stride, dk, scores + j);
  }
}

// sums[i][0, V vectors) += sum over j of weights[i][j] * value[j], for R rows from dimension d on.
template <CacheType T, int R, int V>
DYNO_INLINE void value_tile(const float* weights, const std::byte* value, int64_t value_stride, int64_t d,
                            int64_t count, Ahead& ahead, int64_t bytes, float* sums, int64_t sum_stride) {
  constexpr int N = kCacheStep<T> < V ? kCacheStep<T> : V;
  vf acc[R][V];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[i][v] = load(sums + i * sum_stride + d + v * kLanes);
  }
  for (int64_t j = 0; j < count; ++j) {
    ahead.fetch(bytes);
#pragma GCC unroll 8
    for (int v = 0; v < V; v += N) {
      vf x[N];
      load_cache_step<T>(value + j * value_stride, d + v * kLanes, x);
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) {
        const vf w = broadcast(weights[i * kDecodeKeys + j]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) acc[i][v + n] += w * x[n];
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sums + i * sum_stride + d + v * kLanes, acc[i][v]);
  }
}

template <CacheType T, int R>
void value_rows(const float* weights, const std::byte* value, int64_t value_stride, int64_t dv, int64_t count,
                Ahead& ahead, int64_t bytes, float* sums, int64_t sum_stride) {
  constexpr int kWide = kSums / R < 8 ? kSums / R : 8;
  int64_t d = 0;
  const auto step = [&]<int V>() {
    for (; d + V * kLanes <= dv; d += V * kLanes) {
      value_tile<T, R, V>(weights, value, value_stride, d, count, ahead, d == 0 ? bytes : 0, sums, sum_stride);
    }
  };
  step.template operator()<kWide>();
  if constexpr (kWide > 2) step.template operator()<2>();
  if constexpr (kWide > 1) step.template operator()<1>();
  if (d == dv) return;
  for (int64_t j = 0; j < count; ++j) {
    const vf x = load_cache_tail<T>(value + j * value_stride, d, dv - d);
    for (int i = 0; i < R; ++i) {
      float* sum = sums + i * sum_stride + d;
      store(sum, load(sum) + broadcast(weights[i * kDecodeKeys + j]) * x);
    }
  }
}

// Calls body.operator()<R>(i) for rows [i, i + R), until all rows are covered.
template <typename Body>
DYNO_INLINE void by_rows(int64_t rows, const Body& body) {
  int64_t i = 0;
  const auto step = [&]<int R>() {
    for (; i + R <= rows; i += R) body.template operator()<R>(i);
  };
  step.template operator()<8>();
  step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

// `bytes`: bytes to prefetch per key.
template <CacheType T>
void dot_block(const float* queries, int64_t query_stride, const std::byte* key, int64_t key_stride, int64_t dk,
               int64_t count, int64_t rows, Ahead& ahead, int64_t bytes, float* scores) {
  by_rows(rows, [&]<int R>(int64_t i) {
    dot_rows<T, R>(queries + i * query_stride, query_stride, key, key_stride, dk, count, ahead, i == 0 ? bytes : 0,
                   scores + i * kDecodeKeys);
  });
}

template <CacheType T>
void value_block(const float* weights, const std::byte* value, int64_t value_stride, int64_t dv, int64_t count,
                 int64_t rows, Ahead& ahead, int64_t bytes, float* sums, int64_t sum_stride) {
  by_rows(rows, [&]<int R>(int64_t i) {
    value_rows<T, R>(weights + i * kDecodeKeys, value, value_stride, dv, count, ahead, i == 0 ? bytes : 0,
                     sums + i * sum_stride, sum_stride);
  });
}

// Turns one row's scores of a block into weights, and updates its maximum, total and sum.
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

void attention_decode(const AttentionTask& task, float* scratch, float* partial, int64_t head_stride,
                      int64_t row_stride) {
  const int64_t rows = task.row_end - task.row_begin, heads = task.kv_heads;
  const int64_t dk_pad = round_up(task.dk, 16);
  float* queries = scratch;
  float* scores = scratch + heads * rows * dk_pad;
  const float scale = query_scale(task);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < rows; ++i) {
      const float* q = query_row(task, task.row_begin + i) + h * task.group * task.dk;
      float* query = queries + (h * rows + i) * dk_pad;
      for (int64_t d = 0; d < dk_pad; ++d) query[d] = d < task.dk ? q[d] * scale : 0.0f;
      float* out = partial + h * head_stride + i * row_stride;
      __builtin_memset(out, 0, static_cast<size_t>(kPartialHead + round_up(task.dv, 16)) * sizeof(float));
      out[0] = kMasked;
    }
  }
  const int64_t key_stride = task.args->k_row_bytes;
  const int64_t value_stride = task.v_in_k ? key_stride : task.args->v_row_bytes;
  const int64_t value_bytes = task.v_in_k ? task.k_head_bytes : task.v_head_bytes;
  // If values are part of keys, both steps of a block prefetch keys.
  const int64_t wanted_by_values = task.v_in_k ? task.k_head_bytes / 2 : task.v_head_bytes;
  const int64_t wanted_by_keys = task.v_in_k ? task.k_head_bytes - wanted_by_values : task.k_head_bytes;
  Ahead ahead(task);
  for (int64_t key = task.key_begin; key < task.key_end; key += kDecodeKeys) {
    const int64_t count = task.key_end - key < kDecodeKeys ? task.key_end - key : kDecodeKeys;
    const std::byte* const keys = key_row(task, key);
    with_type(task.k_type, [&]<CacheType T>() {
      for (int64_t j = 0; j < count; j += kTileKeys) {
        const int64_t tile = count - j < kTileKeys ? count - j : kTileKeys;
        for (int64_t h = 0; h < heads; ++h) {
          dot_block<T>(queries + h * rows * dk_pad, dk_pad, keys + j * key_stride + h * task.k_head_bytes, key_stride,
                       task.dk, tile, rows, ahead, wanted_by_keys, scores + h * rows * kDecodeKeys + j);
        }
      }
    });
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        softmax_row(task, row_position(task, task.row_begin + i), key, count, scores + (h * rows + i) * kDecodeKeys,
                    partial + h * head_stride + i * row_stride);
      }
    }
    const std::byte* const values = value_row(task, key);
    with_type(task.v_in_k ? task.k_type : task.v_type, [&]<CacheType T>() {
      for (int64_t j = 0; j < count; j += kTileKeys) {
        const int64_t tile = count - j < kTileKeys ? count - j : kTileKeys;
        for (int64_t h = 0; h < heads; ++h) {
          value_block<T>(scores + h * rows * kDecodeKeys + j, values + j * value_stride + h * value_bytes, value_stride,
                         task.dv, tile, rows, ahead, wanted_by_values, partial + h * head_stride + kPartialHead,
                         row_stride);
        }
      }
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
