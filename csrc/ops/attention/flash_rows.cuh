// The rows of a computing warpgroup in Hopper's flash attention kernels: softmax, combination and results.
#pragma once

#include "device/flash.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma.cuh"
#include "ops/attention/flash_task.cuh"

namespace dyno::ops {

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
// kKeys: keys in a step. Weights are multiplied by 2^kWeightLog2, and finish() divides sums and totals by it.
template <int kKeys, int kDv, int kWeightLog2 = 0>
struct FlashRows {
  const CudaAttention& t;
  float scores[kKeys / 2];
  float sums[kDv / 2];
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
          score = kWeightLog2 == 0 ? device::exp2_fast(score - base)
                                   : device::exp2_fast((score - base) + static_cast<float>(kWeightLog2));
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
  // Completes sums over whole rows, in units of e.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      total[h] += __shfl_xor_sync(device::kFullMask, total[h], 1);
      total[h] += __shfl_xor_sync(device::kFullMask, total[h], 2);
      best[h] /= kLog2E;
    }
    if constexpr (kWeightLog2 != 0) {
      constexpr float kInverse = 1.0f / (1 << kWeightLog2);
#pragma unroll
      for (int h = 0; h < 2; ++h) total[h] *= kInverse;
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) sums[i] *= kInverse;
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

}  // namespace dyno::ops
