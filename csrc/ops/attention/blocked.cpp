// Attention of a tile of query rows over blocks of keys: two register-tiled matrix products with the online softmax
// between them.
//
// Queries are transposed, so that a vector has one dimension of kLanes rows. The scores of a block are then
// S[key][row]. Every softmax step works on whole vectors of rows without horizontal operations, and S is already the
// left operand of the second product in its reading order. Keys and values of a block are widened to f32 once for all
// rows of the tile. Rows are processed in panels of up to kPanel, so that a panel of queries and its scores stay in the
// first-level cache.
//
// The results of a row depend only on that row and its keys, so the division of rows into tiles does not change any
// bit.
#include "ops/attention/cache_load.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

// Accumulators of the products: kRegRows x kRegVectors vectors and the operands fill the register file.
constexpr int kRegRows = 6;
constexpr int kRegVectors = kLanes == 16 ? 4 : 2;
constexpr int64_t kPanel = kLanes * kRegVectors;

constexpr float kMasked = -__builtin_inff();

struct Buffers {
  float* queries;     // panels of [dk][width]
  float* keys;        // [k_block][dk padded]
  float* values;      // [k_block][dv padded]
  float* scores;      // [k_block][width] of one panel
  float* sums;        // [rows][dv padded]
  float* best;        // [rows] running maximum
  float* total;       // [rows] running sum of exponentials
  float* shrink;      // [kPanel]
  int32_t* position;  // [rows]
};

Buffers lay_out(float* base, int64_t q_tile, int64_t k_block, int64_t dk, int64_t dv) {
  const int64_t rows = round_up(q_tile, kPanel), dk_pad = round_up(dk, 16), dv_pad = round_up(dv, 16);
  const auto take = [&base](int64_t count) {
    float* at = base;
    base += round_up(count, 16);
    return at;
  };
  Buffers b;
  b.queries = take(rows * dk);
  b.keys = take(k_block * dk_pad);
  b.values = take(k_block * dv_pad);
  b.scores = take(k_block * kPanel);
  b.sums = take(rows * dv_pad);
  b.best = take(rows);
  b.total = take(rows);
  b.shrink = take(kPanel);
  b.position = reinterpret_cast<int32_t*>(take(rows));
  return b;
}

// scores[i][0, V vectors) = sum over d of keys[i][d] * queries[d][.], for R keys.
template <int R, int V>
DYNO_INLINE void score_tile(const float* keys, int64_t key_stride, const float* queries, int64_t dk, float* scores) {
  vf acc[R][V] = {};
  for (int64_t d = 0; d < dk; ++d) {
    vf q[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) q[v] = load(queries + (d * V + v) * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
      const vf k = broadcast(keys[i * key_stride + d]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[i][v] += k * q[v];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(scores + (i * V + v) * kLanes, acc[i][v]);
  }
}

template <int V>
void score_panel(const float* keys, int64_t key_stride, const float* queries, int64_t dk, float* scores,
                 int64_t count) {
  int64_t j = 0;
  const auto step = [&]<int R>() {
    for (; j + R <= count; j += R) {
      score_tile<R, V>(keys + j * key_stride, key_stride, queries, dk, scores + j * V * kLanes);
    }
  };
  step.template operator()<kRegRows>();
  step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

// sums[i][.] = sums[i][.] * shrink[i] + sum over j of weights[j][i] * values[j][.], for R rows and V vectors.
template <int R, int V>
DYNO_INLINE void value_tile(const float* weights, int64_t weight_stride, const float* values, int64_t value_stride,
                            int64_t count, const float* shrink, float* sums, int64_t sum_stride) {
  vf acc[R][V];
#pragma GCC unroll 6
  for (int i = 0; i < R; ++i) {
    const vf factor = broadcast(shrink[i]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[i][v] = load(sums + i * sum_stride + v * kLanes) * factor;
  }
  for (int64_t j = 0; j < count; ++j) {
    vf x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = load(values + j * value_stride + v * kLanes);
#pragma GCC unroll 6
    for (int i = 0; i < R; ++i) {
      const vf w = broadcast(weights[j * weight_stride + i]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[i][v] += w * x[v];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(sums + i * sum_stride + v * kLanes, acc[i][v]);
  }
}

template <int V>
void value_columns(const float* weights, int64_t width, const float* values, int64_t value_stride, int64_t count,
                   const float* shrink, float* sums, int64_t sum_stride, int64_t rows) {
  int64_t i = 0;
  const auto step = [&]<int R>() {
    for (; i + R <= rows; i += R) {
      value_tile<R, V>(weights + i, width, values, value_stride, count, shrink + i, sums + i * sum_stride, sum_stride);
    }
  };
  step.template operator()<kRegRows>();
  step.template operator()<4>();
  step.template operator()<2>();
  step.template operator()<1>();
}

// The online softmax of one panel: turns scores into weights, and updates best, total and shrink.
template <int V>
void softmax_panel(const AttentionTask& task, float* scores, int64_t first_key, int64_t count, bool mask,
                   const int32_t* position, float* best, float* total, float* shrink) {
  if (task.softcap) {
    for (int64_t i = 0; i < count * V; ++i) {
      store(scores + i * kLanes, apply_softcap(load(scores + i * kLanes), task.args->softcap));
    }
  }
  if (mask) {
    // Row p reads key j iff j <= p and, with a window, p - j < window.
    const int64_t window = task.windowed ? task.args->window : int64_t{1} << 30;
    for (int64_t j = 0; j < count; ++j) {
      const vi key = broadcast_int(static_cast<int32_t>(first_key + j));
      for (int v = 0; v < V; ++v) {
        const vi distance = *reinterpret_cast<const vi_unaligned*>(position + v * kLanes) - key;
        const vi seen = (distance >= 0) & (distance < static_cast<int32_t>(window));
        float* s = scores + (j * V + v) * kLanes;
        store(s, seen ? load(s) : broadcast(kMasked));
      }
    }
  }
  vf top[V], old[V], sum[V] = {};
  for (int v = 0; v < V; ++v) old[v] = top[v] = load(best + v * kLanes);
  for (int64_t j = 0; j < count; ++j) {
    for (int v = 0; v < V; ++v) top[v] = max(top[v], load(scores + (j * V + v) * kLanes));
  }
  vf base[V];
  for (int v = 0; v < V; ++v) {
    store(best + v * kLanes, top[v]);
    base[v] = top[v] == broadcast(kMasked) ? vf{} : top[v];  // no key was read yet: all weights are e^-inf = 0
  }
  for (int64_t j = 0; j < count; ++j) {
    for (int v = 0; v < V; ++v) {
      float* s = scores + (j * V + v) * kLanes;
      const vf weight = exp(load(s) - base[v]);
      sum[v] += weight;
      store(s, weight);
    }
  }
  for (int v = 0; v < V; ++v) {
    const vf factor = exp(old[v] - base[v]);
    store(shrink + v * kLanes, factor);
    store(total + v * kLanes, load(total + v * kLanes) * factor + sum[v]);
  }
}

template <CacheType T>
void widen_block(const std::byte* first, int64_t stride_bytes, int64_t count, int64_t n, float* out,
                 int64_t out_stride) {
  for (int64_t j = 0; j < count; ++j) widen_row<T>(first + j * stride_bytes, out + j * out_stride, n);
}

void widen_block(CacheType type, const std::byte* first, int64_t stride_bytes, int64_t count, int64_t n, float* out,
                 int64_t out_stride) {
  switch (type) {
    case CacheType::f32:
      return widen_block<CacheType::f32>(first, stride_bytes, count, n, out, out_stride);
    case CacheType::f16:
      return widen_block<CacheType::f16>(first, stride_bytes, count, n, out, out_stride);
    case CacheType::bf16:
      return widen_block<CacheType::bf16>(first, stride_bytes, count, n, out, out_stride);
    case CacheType::q8_0:
      return widen_block<CacheType::q8_0>(first, stride_bytes, count, n, out, out_stride);
  }
}

// The scaled queries of a panel as [dk][width]; rows past the end are zeros.
void pack_queries(const AttentionTask& task, int64_t first_row, int64_t rows, int64_t width, float* out) {
  const float scale = query_scale(task);
  for (int64_t group = 0; group < width; group += kLanes) {
    const float* row[kLanes];
    float factor[kLanes];
    for (int64_t r = 0; r < kLanes; ++r) {
      const bool real = group + r < rows;
      row[r] = query_row(task, first_row + (real ? group + r : 0));
      factor[r] = real ? scale : 0.0f;
    }
    for (int64_t d = 0; d < task.dk; ++d) {
      for (int64_t r = 0; r < kLanes; ++r) out[d * width + group + r] = row[r][d] * factor[r];
    }
  }
}

template <int V>
void panel_step(const AttentionTask& task, const Buffers& b, int64_t panel, int64_t rows, int64_t first_key,
                int64_t count, const float* keys, int64_t key_stride, const float* values, int64_t value_stride) {
  constexpr int64_t kWidth = V * kLanes;
  const int64_t dv_pad = round_up(task.dv, 16);
  const int32_t* position = b.position + panel;
  const int64_t first_seen_to = position[0], last_seen_to = position[rows - 1];
  const bool mask =
      first_key + count - 1 > first_seen_to || (task.windowed && first_key <= last_seen_to - task.args->window);
  score_panel<V>(keys, key_stride, b.queries + panel * task.dk, task.dk, b.scores, count);
  softmax_panel<V>(task, b.scores, first_key, count, mask, position, b.best + panel, b.total + panel, b.shrink);
  float* sums = b.sums + panel * dv_pad;
  int64_t d = 0;
  for (; d + kPanel <= dv_pad; d += kPanel) {
    value_columns<kRegVectors>(b.scores, kWidth, values + d, value_stride, count, b.shrink, sums + d, dv_pad, rows);
  }
  for (; d < task.dv; d += kLanes) {
    value_columns<1>(b.scores, kWidth, values + d, value_stride, count, b.shrink, sums + d, dv_pad, rows);
  }
}

}  // namespace

void attention_blocked(const AttentionTask& task, int64_t q_tile, int64_t k_block, float* scratch) {
  const Buffers b = lay_out(scratch, q_tile, k_block, task.dk, task.dv);
  const AttentionArgs& args = *task.args;
  const int64_t rows = task.row_end - task.row_begin;
  const int64_t dk_pad = round_up(task.dk, 16), dv_pad = round_up(task.dv, 16);
  for (int64_t r = 0; r < round_up(rows, kLanes); ++r) {
    const int64_t row = task.row_begin + (r < rows ? r : rows - 1);
    b.position[r] = static_cast<int32_t>(row_position(task, row));
    b.best[r] = kMasked;
    b.total[r] = 0;
  }
  __builtin_memset(b.sums, 0, static_cast<size_t>(rows * dv_pad) * sizeof(float));
  for (int64_t panel = 0; panel < rows; panel += kPanel) {
    const int64_t in_panel = rows - panel < kPanel ? rows - panel : kPanel;
    pack_queries(task, task.row_begin + panel, in_panel, round_up(in_panel, kLanes), b.queries + panel * task.dk);
  }

  // Blocks start at multiples of k_block for every tile.
  for (int64_t block = task.key_begin / k_block * k_block; block < task.key_end; block += k_block) {
    const int64_t begin = block > task.key_begin ? block : task.key_begin;
    const int64_t end = block + k_block < task.key_end ? block + k_block : task.key_end;
    widen_block(task.k_type, key_row(task, begin), args.k_row_bytes, end - begin, task.dk, b.keys, dk_pad);
    if (!task.v_in_k) {
      widen_block(task.v_type, value_row(task, begin), args.v_row_bytes, end - begin, task.dv, b.values, dv_pad);
    }
    const float* values = task.v_in_k ? b.keys : b.values;
    const int64_t value_stride = task.v_in_k ? dk_pad : dv_pad;
    for (int64_t panel = 0; panel < rows; panel += kPanel) {
      const int64_t in_panel = rows - panel < kPanel ? rows - panel : kPanel;
      const int64_t last_seen = b.position[panel + in_panel - 1] + 1;
      const int64_t first_seen = task.windowed ? b.position[panel] - args.window + 1 : 0;
      const int64_t first = begin > first_seen ? begin : first_seen;
      const int64_t last = end < last_seen ? end : last_seen;
      if (first >= last) continue;
      const float* k = b.keys + (first - begin) * dk_pad;
      const float* v = values + (first - begin) * value_stride;
      switch (round_up(in_panel, kLanes) / kLanes) {
        case 1:
          panel_step<1>(task, b, panel, in_panel, first, last - first, k, dk_pad, v, value_stride);
          break;
        case 2:
          panel_step<2>(task, b, panel, in_panel, first, last - first, k, dk_pad, v, value_stride);
          break;
#if defined(__AVX512F__)
        case 3:
          panel_step<3>(task, b, panel, in_panel, first, last - first, k, dk_pad, v, value_stride);
          break;
        default:
          panel_step<4>(task, b, panel, in_panel, first, last - first, k, dk_pad, v, value_stride);
          break;
#endif
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    write_output(task, task.row_begin + r, b.sums + r * dv_pad, b.best[r], b.total[r]);
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
