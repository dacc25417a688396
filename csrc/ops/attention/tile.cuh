// The work of a block of an attention kernel, and its end: it writes complete rows, or parts of rows that the last
// block combines in order.
#pragma once

#include "device/arithmetic.cuh"
#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "ops/attention/kernels_cuda.h"

namespace dyno::ops {

struct CudaAttention {
  AttentionArgs args;
  int tokens, group, heads, kv_heads, dk, dv;
  int64_t k_head_bytes, v_head_bytes;
  bool v_in_k, sinks, windowed, softcap;
  int splits;
  float* partials;    // [tile][kv head][split][row][2 + dv]: maximum, sum, weighted values
  int32_t* counters;  // [tile][kv head]
  int selected;       // positions that a token reads at most; 0: all

  __device__ float query_scale() const { return softcap ? device::quotient(args.scale, args.softcap) : args.scale; }
};

struct CudaTile {
  SequenceRun run;
  int row_begin = 0, row_end = 0;  // both 0: no such tile
  int rows_before = 0;             // of earlier runs
  int key_begin = 0, key_end = 0;  // keys that any of its rows reads

  __device__ bool empty() const { return row_begin >= row_end; }
  __device__ int rows() const { return row_end - row_begin; }
};

// Tile `tile` of the `tiles` of a run. The last rows of a run come first, because they read the most keys and take the
// longest.
__device__ __forceinline__ CudaTile tile_of_run(const CudaAttention& task, const SequenceRun& run, int tile, int tiles,
                                                int tile_rows, int rows_before) {
  CudaTile out;
  out.run = run;
  out.rows_before = rows_before;
  out.row_begin = (tiles - 1 - tile) * tile_rows;
  out.row_end = min(out.row_begin + tile_rows, run.n_tokens * task.group);
  out.key_end = run.position + (out.row_end - 1) / task.group + 1;
  const int first = run.position + out.row_begin / task.group;
  out.key_begin = task.windowed ? max(0, first - task.args.window + 1) : 0;
  return out;
}

__device__ __forceinline__ CudaTile find_tile(const CudaAttention& task, int tile, int tile_rows) {
  int before = 0;
  for (int r = 0; r < task.args.n_runs; ++r) {
    const SequenceRun run = task.args.runs[r];
    const int rows = run.n_tokens * task.group, tiles = (rows + tile_rows - 1) / tile_rows;
    if (tile < tiles) return tile_of_run(task, run, tile, tiles, tile_rows, before);
    tile -= tiles;
    before += rows;
  }
  return {};
}

// The same for attention to selected positions. Tiles have rows of one token, and its keys are numbers in its list.
__device__ __forceinline__ CudaTile find_selected_tile(const CudaAttention& task, int tile, int tile_rows) {
  const int per_token = (task.group + tile_rows - 1) / tile_rows, token = tile / per_token;
  for (int r = 0; r < task.args.n_runs; ++r) {
    const SequenceRun run = task.args.runs[r];
    const int within = token - run.first_token;
    if (within < 0 || within >= run.n_tokens) continue;
    CudaTile out;
    out.run = {token, 1, run.position + within, run.slot};
    out.row_begin = tile % per_token * tile_rows;
    out.row_end = min(out.row_begin + tile_rows, task.group);
    out.key_end = min(out.run.position + 1, task.selected);
    return out;
  }
  return {};
}
template <bool kSelected>
__device__ __forceinline__ CudaTile find_tile_of(const CudaAttention& task, int tile, int tile_rows) {
  return kSelected ? find_selected_tile(task, tile, tile_rows) : find_tile(task, tile, tile_rows);
}

// The row of the cache that holds a key. A token that sees no more positions than it may read has no list.
template <bool kSelected>
struct KeyRows {
  const int32_t* list = nullptr;
  __device__ KeyRows(const CudaAttention& t, const CudaTile& tile) {
    if constexpr (kSelected) {
      if (tile.run.position >= t.selected) list = t.args.selected + tile.run.first_token * t.args.selected_stride;
    }
  }
  __device__ int operator[](int key) const {
    if constexpr (kSelected) return list == nullptr ? key : list[key];
    return key;
  }
};

// find_tile() by a whole warp, whose lanes check one run each. A serial search over the runs of many sequences would
// take as long as attention over few keys.
__device__ __forceinline__ CudaTile find_tile_warp(const CudaAttention& task, int tile, int tile_rows, int lane) {
  int before = 0;
  for (int base = 0; base < task.args.n_runs; base += 32) {
    SequenceRun run;
    if (base + lane < task.args.n_runs) run = task.args.runs[base + lane];
    const int rows = run.n_tokens * task.group, tiles = (rows + tile_rows - 1) / tile_rows;
    int tiles_to = tiles, rows_to = rows;  // of this run and the previous ones
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int more_tiles = __shfl_up_sync(device::kFullMask, tiles_to, offset);
      const int more_rows = __shfl_up_sync(device::kFullMask, rows_to, offset);
      if (lane >= offset) tiles_to += more_tiles, rows_to += more_rows;
    }
    const unsigned found = __ballot_sync(device::kFullMask, tile < tiles_to);
    if (found != 0) {
      const int from = __ffs(static_cast<int>(found)) - 1;
      const auto of = [&](int value) { return __shfl_sync(device::kFullMask, value, from); };
      const SequenceRun its{of(run.first_token), of(run.n_tokens), of(run.position), of(run.slot)};
      return tile_of_run(task, its, tile - of(tiles_to - tiles), of(tiles), tile_rows, before + of(rows_to - rows));
    }
    tile -= __shfl_sync(device::kFullMask, tiles_to, 31);
    before += __shfl_sync(device::kFullMask, rows_to, 31);
  }
  return {};
}

__device__ __forceinline__ const uint8_t* key_rows(const CudaAttention& t, const SequenceRun& run, int kv_head) {
  return reinterpret_cast<const uint8_t*>(t.args.k_cache) + run.slot * t.args.slot_positions * t.args.k_row_bytes +
         kv_head * t.k_head_bytes;
}
__device__ __forceinline__ const uint8_t* value_rows(const CudaAttention& t, const SequenceRun& run, int kv_head) {
  if (t.v_in_k) return key_rows(t, run, kv_head);
  return reinterpret_cast<const uint8_t*>(t.args.v_cache) + run.slot * t.args.slot_positions * t.args.v_row_bytes +
         kv_head * t.v_head_bytes;
}
__device__ __forceinline__ const float* query_row(const CudaAttention& t, const CudaTile& tile, int row, int kv_head) {
  const int64_t token = tile.run.first_token + row / t.group;
  return t.args.q + token * t.args.q_stride + int64_t{kv_head * t.group + row % t.group} * t.dk;
}
__device__ __forceinline__ float* output_row(const CudaAttention& t, const CudaTile& tile, int row, int kv_head) {
  const int64_t token = tile.run.first_token + row / t.group;
  return t.args.out + token * t.args.out_stride + int64_t{kv_head * t.group + row % t.group} * t.dv;
}

// Whether `row` (of the run) reads key `key`.
__device__ __forceinline__ bool sees(const CudaAttention& t, const CudaTile& tile, int row, int key) {
  const int distance = tile.run.position + row / t.group - key;
  return distance >= 0 && (!t.windowed || distance < t.args.window);
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// The factor of a row's weighted values, given its maximum and the sum of its weights; the sink is added to the
// denominator.
__device__ __forceinline__ float output_factor(const CudaAttention& t, int row, int kv_head, float best, float total) {
  if (!t.sinks) return device::quotient(1.0f, total);
  const float sink = t.args.sinks[kv_head * t.group + row % t.group];
  const float top = fmaxf(sink, best);
  const float shrink = expf(best - top);
  return device::quotient(shrink, total * shrink + expf(sink - top));
}

__device__ __forceinline__ float* partial_row(const CudaAttention& t, int tile, int tile_rows, int kv_head, int split,
                                              int row) {
  const int64_t index = ((int64_t{tile} * t.kv_heads + kv_head) * t.splits + split) * tile_rows + row;
  return t.partials + index * (2 + t.dv);
}

// The same by rows of the batch, without space for incomplete tiles: [kv head][split][row of the batch][2 + dv].
__device__ __forceinline__ float* batch_partial_row(const CudaAttention& t, const CudaTile& tile, int kv_head,
                                                    int split, int row) {
  const int64_t rows = int64_t{t.tokens} * t.group, at = tile.rows_before + tile.row_begin + row;
  return t.partials + ((int64_t{kv_head} * t.splits + split) * rows + at) * (2 + t.dv);
}

// The keys of a tile that a split processes. Splits beyond `active` have none and exit at once; a tile with one active
// split is written directly.
struct KeyRange {
  int begin, end;
  int active;
};
__device__ __forceinline__ KeyRange split_keys(const CudaAttention& t, const CudaTile& tile, int split, int step) {
  const int keys = tile.key_end - tile.key_begin;
  const int each = ((keys + t.splits - 1) / t.splits + step - 1) / step * step;
  const int begin = tile.key_begin + split * each;
  return {begin, min(begin + each, tile.key_end), (keys + each - 1) / each};
}

// Called by every thread after the block has written its partial rows. The last of the tile's active blocks combines
// them, always in the order of the splits: a warp takes a row, and its lanes take the splits' weights and then the
// dimensions. `first_part(row)` is split 0's part of a row; the parts of other splits follow at distances of `step`
// floats.
template <typename FirstPart>
__device__ __forceinline__ void combine_parts(const CudaAttention& t, const CudaTile& tile, int tile_index, int kv_head,
                                              int active, int64_t step, const FirstPart& first_part) {
  __shared__ bool last;
  __threadfence();  // this thread's part is visible to the block that counts last
  __syncthreads();  // … and so are those of the whole block
  if (threadIdx.x == 0) {
    int32_t* counter = t.counters + tile_index * t.kv_heads + kv_head;
    last = atomicAdd(counter, 1) == active - 1;
    if (last) *counter = 0;  // for the next launch
  }
  __syncthreads();
  if (!last) return;
  __threadfence();  // the parts of other blocks are read after their counts
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  for (int row = threadIdx.x / 32; row < tile.rows(); row += warps) {
    const float* first = first_part(row);
    const float* mine = first + lane * step;
    const float m = lane < active ? __ldcg(mine) : minus_infinity();
    const float part_total = lane < active ? __ldcg(mine + 1) : 0.0f;
    const float best = device::warp_max(m);
    const float weight = m == minus_infinity() ? 0.0f : expf(m - best);
    const float total = device::warp_sum(part_total * weight);
    const float factor = output_factor(t, tile.row_begin + row, kv_head, best, total);
    float* out = output_row(t, tile, tile.row_begin + row, kv_head);
    for (int base = 0; base < t.dv; base += 32) {
      const int d = base + lane;
      float sum = 0;
#pragma unroll 8
      for (int s = 0; s < active; ++s) {
        const float w = __shfl_sync(device::kFullMask, weight, s);
        const float v = d < t.dv ? __ldcg(first + s * step + 2 + d) : 0.0f;
        if (w != 0.0f) sum += v * w;
      }
      if (d < t.dv) out[d] = sum * factor;
    }
  }
}

__device__ __forceinline__ void combine_partials(const CudaAttention& t, const CudaTile& tile, int tile_index,
                                                 int tile_rows, int kv_head, int active) {
  combine_parts(t, tile, tile_index, kv_head, active, int64_t{tile_rows} * (2 + t.dv),
                [&](int row) { return partial_row(t, tile_index, tile_rows, kv_head, 0, row); });
}

CudaAttention make_cuda_attention(const AttentionArgs& args, const AttentionDesc& desc, int splits, CudaStream& stream);

}  // namespace dyno::ops
