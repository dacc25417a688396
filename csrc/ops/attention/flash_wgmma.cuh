// Flash attention for prompts on Hopper: products by wgmma, with one warpgroup that only loads and two that only
// compute.
//
// The loading warpgroup fills stages of keys and of values in shared memory, each guarded by a pair of barriers (full,
// empty). A computing warpgroup has 64 query rows. It starts the scores of the next keys, then the weighted values of
// the last ones, and computes the next weights while the latter run (FlashAttention-3, arXiv:2407.08608, section 3).
//   kRowGroups = 2: the two have different rows and share every block of keys. They take turns in starting
//                   products, so that the exponentials of one run during the products of the other.
//   kRowGroups = 1: both have the same rows and process alternating blocks of keys; their results are combined at
//                   the end.
//
// Heads are padded with zeros to kDk and kDv. The order of sums depends only on the shapes.
#pragma once

#include "device/dependent.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma_flash.cuh"
#include "ops/attention/flash_load.cuh"

namespace dyno::ops {

template <int kDk, int kDv, int kRowGroups>
struct FlashWgmma {
  static constexpr int kRows = 64 * kRowGroups;
  static constexpr int kKeys = flash_wgmma_keys(kDk, kRowGroups);
  static constexpr int kStages = flash_wgmma_stages(kDk, kRowGroups);
  static constexpr int kThreads = 384;
  static constexpr uint32_t kQueryPanel = kRows * 128, kKeyPanel = kKeys * 128;  // bytes of 64 columns
  static constexpr uint32_t kQueryBytes = kQueryPanel * (kDk / 64);
  static constexpr uint32_t kKeyBytes = kKeyPanel * (kDk / 64), kStageBytes = kKeyPanel * ((kDk + kDv) / 64);
  static constexpr uint32_t kBarriers = kQueryBytes + kStages * kStageBytes;    // their offset
  static constexpr uint32_t kSharedBytes = kBarriers + kStages * 4 * 8 + 1024;  // and padding to align the start
};

#ifdef DYNO_DEVICE_WGMMA

inline constexpr int kConsumers = 256;
inline constexpr int kMeet = 1,
                     kTurn = 2;  // named barriers: all computing threads; the turn of each computing warpgroup

// Prevents the compiler from moving uses of accumulators before the wait.
template <int kCount>
__device__ __forceinline__ void hold_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A thread's part of the 64 rows of a computing warpgroup: rows g and g + 8 of its warp's 16.
template <int kDk, int kDv, bool kBf16, int kRowGroups>
struct FlashRows {
  using Shape = FlashWgmma<kDk, kDv, kRowGroups>;
  static constexpr int kKeys = Shape::kKeys;

  const CudaAttention& t;
  float scores[kKeys / 2];
  float sums[kDv / 2];
  uint32_t weights[kKeys / 16][4];
  float best[2], total[2], shrink[2];
  int position[2], first_position, last_position, end, quad;

  __device__ FlashRows(const CudaAttention& task, const CudaTile& tile, int row_offset, int key_end)
      : t(task), end(key_end), quad(threadIdx.x % 4) {
    const int first = tile.row_begin + row_offset + threadIdx.x % 128 / 32 * 16, last = tile.row_end - 1;
    const auto position_of = [&](int row) { return tile.run.position + min(row, last) / t.group; };
    first_position = position_of(first), last_position = position_of(first + 15);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position[h] = position_of(first + threadIdx.x % 32 / 4 + 8 * h);
      best[h] = minus_infinity(), total[h] = 0;
    }
#pragma unroll
    for (int i = 0; i < kDv / 2; ++i) sums[i] = 0;
  }

  __device__ __forceinline__ void start_scores(uint32_t queries, uint32_t keys) {
    device::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kDk / 16; ++s) {
      const uint64_t a = device::wgmma_descriptor(queries + s / 4 * Shape::kQueryPanel + s % 4 * 32);
      const uint64_t b = device::wgmma_descriptor(keys + s / 4 * Shape::kKeyPanel + s % 4 * 32);
      device::wgmma_scores<kBf16>(scores, a, b, s != 0);
    }
    device::wgmma_commit();
  }
  __device__ __forceinline__ void start_values(uint32_t values) {
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      device::wgmma_values<kBf16>(sums, weights[k],
                                  device::wgmma_descriptor_transposed(values + k * 2048, Shape::kKeyPanel));
    }
    device::wgmma_commit();
  }

  // Turns the scores of keys first, first + 1, … into weights in place, and computes the factor of earlier sums.
  __device__ __forceinline__ void softmax(int first) {
    if (t.softcap) {
      const float cap = t.args.softcap * kLog2E;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) scores[i] = cap * tanhf(scores[i]);
    }
    const bool edge = first + kKeys > end || first + kKeys - 1 > first_position ||
                      (t.windowed && first <= last_position - t.args.window);
    if (edge) {
      const int window = t.windowed ? t.args.window : 0x7fffffff;
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int key = first + i / 4 * 8 + quad * 2 + i % 2, distance = position[i / 2 % 2] - key;
        if (key >= end || distance < 0 || distance >= window) scores[i] = minus_infinity();
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = best[h];
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 4) top = fmaxf(top, fmaxf(scores[i + 2 * h], scores[i + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, 2));
      const float base = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are 0
      shrink[h] = device::exp2_fast(best[h] - base);
      best[h] = top;
      float sum[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[i + 2 * h + e];
          score = device::exp2_fast(score - base);
          sum[e] += score;
        }
      }
      total[h] = total[h] * shrink[h] + (sum[0] + sum[1]);  // over this lane's columns; the quad is summed at the end
    }
  }
  __device__ __forceinline__ void shrink_sums() {
#pragma unroll
    for (int i = 0; i < kDv / 2; ++i) sums[i] *= shrink[i / 2 % 2];
  }
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        weights[k][j] = device::pack2<kBf16>(scores[8 * k + 2 * j], scores[8 * k + 2 * j + 1]);
    }
  }
  // Completes sums over whole rows, in units of e.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total[h] += __shfl_xor_sync(device::kFullMask, total[h], 1);
      total[h] += __shfl_xor_sync(device::kFullMask, total[h], 2);
      best[h] /= kLog2E;
    }
  }
  // Combines both warpgroups' results of the same rows in the first one's registers. `place` has kDv / 2 + 4 floats per
  // thread.
  __device__ __forceinline__ void merge(float* place, int group) {
    float* mine = place + threadIdx.x % 128;
    device::named_sync(kMeet, kConsumers);  // stages are no longer read
    if (group == 1) {
#pragma unroll
      for (int h = 0; h < 2; ++h) mine[h * 128] = best[h], mine[(2 + h) * 128] = total[h];
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) mine[(4 + i) * 128] = sums[i];
    }
    device::named_sync(kMeet, kConsumers);  // the results of the second one are written
    if (group == 1) return;
    float scale[2], other_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float other = mine[h * 128], top = fmaxf(best[h], other), base = top == minus_infinity() ? 0.0f : top;
      scale[h] = expf(best[h] - base), other_scale[h] = expf(other - base);
      total[h] = total[h] * scale[h] + mine[(2 + h) * 128] * other_scale[h];
      best[h] = top;
    }
#pragma unroll
    for (int i = 0; i < kDv / 2; ++i) {
      sums[i] = sums[i] * scale[i / 2 % 2] + mine[(4 + i) * 128] * other_scale[i / 2 % 2];
    }
  }
  // The sums belong to value columns from `first_column` on.
  __device__ __forceinline__ void store(const CudaTile& tile, int row_offset, int kv_head, int split, bool whole,
                                        int first_column = 0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_offset + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
      if (row >= tile.rows()) continue;
      float* out = whole ? output_row(t, tile, tile.row_begin + row, kv_head)
                         : batch_partial_row(t, tile, kv_head, split, row) + 2;
      const float factor = whole ? output_factor(t, tile.row_begin + row, kv_head, best[h], total[h]) : 1.0f;
      const bool paired = (reinterpret_cast<uintptr_t>(out) | static_cast<uint64_t>(t.dv * 4)) % 8 == 0;
#pragma unroll
      for (int n = 0; n < kDv / 8; ++n) {
        const int d = first_column + n * 8 + quad * 2;
        if (paired && d < t.dv) {
          *reinterpret_cast<float2*>(out + d) =
              make_float2(sums[4 * n + 2 * h] * factor, sums[4 * n + 2 * h + 1] * factor);
          continue;
        }
        if (d < t.dv) out[d] = sums[4 * n + 2 * h] * factor;
        if (d + 1 < t.dv) out[d + 1] = sums[4 * n + 2 * h + 1] * factor;
      }
      if (!whole && quad == 0 && first_column == 0) out[-2] = best[h], out[-1] = total[h];
    }
  }
};

#endif  // DYNO_DEVICE_WGMMA

template <int kDk, int kDv, bool kBf16, int kRowGroups>
__global__ void __launch_bounds__(384, 1) flash_wgmma_kernel(const __grid_constant__ FlashTask task) {
#ifdef DYNO_DEVICE_WGMMA
  device::wait_for_previous();
  using Shape = FlashWgmma<kDk, kDv, kRowGroups>;
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages;
  const CudaAttention& t = task.common;
  const int kv_head = blockIdx.x, tile_index = blockIdx.y, split = blockIdx.z, group = threadIdx.x / 128 - 1;
  const CudaTile tile = find_tile(t, tile_index, Shape::kRows);
  if (tile.empty()) return;
  const KeyRange range = split_keys(t, tile, split, flash_split_step(kKeys));
  if (split >= range.active) return;
  const int blocks = (range.end - range.begin + kKeys - 1) / kKeys;

  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const uint32_t base = device::shared_address(shared);
  const auto key_stage = [&](int block) { return base + Shape::kQueryBytes + block % kStages * Shape::kStageBytes; };
  const auto value_stage = [&](int block) { return key_stage(block) + Shape::kKeyBytes; };
  // Full and empty barriers of keys, then of values.
  const auto barrier = [&](int which, int block) {
    return base + Shape::kBarriers + (which * kStages + block % kStages) * 8;
  };
  const auto parity = [&](int block) { return block / kStages & 1; };
  constexpr int kFullKeys = 0, kEmptyKeys = 1, kFullValues = 2, kEmptyValues = 3;
  if (threadIdx.x < 4 * kStages) {
    // All loading threads arrive at full barriers, and one lane of each reading warp at empty ones.
    const int which = threadIdx.x / kStages;
    device::barrier_init(barrier(which, threadIdx.x % kStages), which % 2 == 0 ? 128 : 4 * kRowGroups);
  }
  __syncthreads();  // barriers are initialised

  if (group < 0) {
    device::fewer_registers<40>();
    const uint8_t* key_base = key_rows(t, tile.run, kv_head);
    const uint8_t* value_base = value_rows(t, tile.run, kv_head);
    const int64_t value_stride = t.v_in_k ? t.args.k_row_bytes : t.args.v_row_bytes;
    for (int block = 0; block < blocks; ++block) {
      const int first = range.begin + block * kKeys, count = range.end - first;
      device::barrier_wait(barrier(kEmptyKeys, block), parity(block) ^ 1);
      load_panels<kDk, kBf16, kKeys>(key_stage(block), key_base + first * t.args.k_row_bytes, t.args.k_row_bytes,
                                     task.k_type, task.aligned, t.dk, count, barrier(kFullKeys, block));
      device::barrier_wait(barrier(kEmptyValues, block), parity(block) ^ 1);
      load_panels<kDv, kBf16, kKeys>(value_stage(block), value_base + first * value_stride, value_stride, task.v_type,
                                     task.aligned, t.dv, count, barrier(kFullValues, block));
    }
    device::copy_async_wait<0>();
  } else {
    device::more_registers<232>();
    load_queries<kDk, kBf16, Shape::kRows>(t, tile, kv_head, base, threadIdx.x - 128);
    device::fence_async_shared();
    device::named_sync(kMeet, kConsumers);  // queries are written

    const int row_offset = kRowGroups == 2 ? 64 * group : 0;
    const uint32_t queries = base + row_offset * 128;
    FlashRows<kDk, kDv, kBf16, kRowGroups> rows(t, tile, row_offset, range.end);
    constexpr int kStep = kRowGroups == 2 ? 1 : 2;
    const int start = kRowGroups == 2 ? 0 : group;
    const auto wait_full = [&](int which, int block) {
      device::barrier_wait(barrier(which, block), parity(block));
      device::fence_async_shared();
    };
    const auto release = [&](int which, int block) {
      if (threadIdx.x % 32 == 0) device::barrier_arrive(barrier(which, block));
    };
    if (start < blocks) {
      wait_full(kFullKeys, start);
      rows.start_scores(queries, key_stage(start));
      device::wgmma_wait<0>();
      hold_registers(rows.scores);
      release(kEmptyKeys, start);
      rows.softmax(range.begin + start * kKeys);
      rows.pack_weights();
      int block = start;
      if (kRowGroups == 2 && group == 1 && blocks > 1) device::named_arrive(kTurn, kConsumers);  // the first one starts
      for (int next = start + kStep; next < blocks; block = next, next += kStep) {
        wait_full(kFullKeys, next);
        if constexpr (kRowGroups == 2) device::named_sync(kTurn + group, kConsumers);
        rows.start_scores(queries, key_stage(next));
        wait_full(kFullValues, block);
        rows.start_values(value_stage(block));
        if constexpr (kRowGroups == 2) {
          // After the last turn, nobody waits.
          if (group == 0 || next + 1 < blocks) device::named_arrive(kTurn + (group ^ 1), kConsumers);
        }
        device::wgmma_wait<1>();
        hold_registers(rows.scores);
        release(kEmptyKeys, next);
        rows.softmax(range.begin + next * kKeys);
        device::wgmma_wait<0>();
        hold_registers(rows.sums);
        release(kEmptyValues, block);
        rows.shrink_sums();
        rows.pack_weights();
      }
      wait_full(kFullValues, block);
      rows.start_values(value_stage(block));
      device::wgmma_wait<0>();
      hold_registers(rows.sums);
    }
    rows.finish();
    if constexpr (kRowGroups == 1) rows.merge(reinterpret_cast<float*>(shared + Shape::kQueryBytes), group);
    const bool whole = range.active == 1;
    if (kRowGroups == 2 || group == 0) rows.store(tile, row_offset, kv_head, split, whole);
  }
#endif
}

}  // namespace dyno::ops
