// Flash attention over f32 caches on tensor cores, with nearly the accuracy of float32: queries, keys, weights and
// values are f16 pairs (half_pairs.cuh), and each product consists of three, the small ones first.
//
// A warp has 16 query rows, as in flash.cuh; all warps of a block share key blocks in shared memory. Keys and values
// are split in registers: the next step's values are in flight during this step's products.
//
// Tensor cores truncate what a sum cannot hold instead of rounding it, which accumulates over a long row of keys. So
// sums do not grow there: four steps of a score, and the weighted values of one key block, are added to the rest by
// float32 additions. Queries of a row have a power-of-two scale, and weights are multiplied by 2^14, so that the whole
// f16 range is used.
#pragma once

#include <cuda_runtime.h>

#include "device/dependent.cuh"
#include "device/flash.cuh"
#include "device/half_pairs.cuh"
#include "ops/attention/flash_query_pairs.cuh"

namespace dyno::ops {

template <int kHead, int kRowWarps>
struct FlashPairs {
  static constexpr int kThreads = 32 * kRowWarps, kRows = 16 * kRowWarps, kKeys = kFlashPairsKeys;
  static constexpr int kValueHead = flash_value_head(kHead);
  // In f16 values; the padding spreads the 8 rows of a matrix over all banks.
  static constexpr int kPitch = kHead + 8, kValuePitch = kValueHead + 8;
  // The high parts; the rests follow.
  static constexpr int kKeyPlane = kKeys * kPitch, kValuePlane = kKeys * kValuePitch, kQueryPlane = kRows * kPitch;

  static constexpr size_t shared_bytes() {
    return size_t{2} * (kKeyPlane + kValuePlane + kQueryPlane) * 2 + kRows * sizeof(float);
  }
};

// A block of cache rows during its transfer to shared memory: eight threads share 64 columns of a row, eight numbers
// each.
template <int kColumns, int kThreads>
struct PairBlock {
  static constexpr int kPanels = kColumns / 64, kRowStep = kThreads / 8, kTurns = kFlashPairsKeys / kRowStep;
  static_assert(kColumns % 64 == 0 && kFlashPairsKeys % kRowStep == 0);
  float v[kTurns][kPanels][8];

  // Loads rows first, first + 1, …; zeros from row `count` and column `width` on. `aligned`: rows start at 16-byte
  // addresses and have a multiple of eight elements.
  __device__ __forceinline__ void load(const uint8_t* rows, int64_t stride, bool aligned, int width, int count) {
    const int first_row = threadIdx.x / 8, first_column = threadIdx.x % 8 * 8;
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int row = first_row + i * kRowStep;
        const auto* from = reinterpret_cast<const float*>(rows + row * stride) + first_column;
#pragma unroll
        for (int p = 0; p < kPanels; ++p) {
          device::load_eight(v[i][p], from + p * 64, row < count && p * 64 + first_column < width);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = first_row + i * kRowStep;
      const auto* from = reinterpret_cast<const float*>(rows + row * stride);
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int column = p * 64 + first_column + e;
          v[i][p][e] = row < count && column < width ? from[column] : 0.0f;
        }
      }
    }
  }
  __device__ __forceinline__ void store(uint16_t* halves, uint16_t* rests) const {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
#pragma unroll
      for (int p = 0; p < kPanels; ++p) {
        const int at = (threadIdx.x / 8 + i * kRowStep) * (kColumns + 8) + p * 64 + threadIdx.x % 8 * 8;
        uint4 high, rest;
        device::split_eight(v[i][p], device::kRestScale, high, rest);
        *reinterpret_cast<uint4*>(halves + at) = high;
        *reinterpret_cast<uint4*>(rests + at) = rest;
      }
    }
  }
};

template <int kHead, int kRowWarps>
__global__ void __launch_bounds__(32 * kRowWarps, kRowWarps == 4 ? 2 : 1)
    flash_pairs_kernel(const __grid_constant__ FlashTask task) {
  device::let_next_start();
  device::wait_for_previous();
  using Shape = FlashPairs<kHead, kRowWarps>;
  constexpr int kKeys = Shape::kKeys, kPitch = Shape::kPitch, kValuePitch = Shape::kValuePitch;
  constexpr int kSteps = kHead / 16, kKeyTiles = kKeys / 8, kValueHead = Shape::kValueHead;
  constexpr int kValueTiles = kValueHead / 8, kWeightSteps = kKeys / 16;
  constexpr int kFoldedSteps = 4;  // of a score, before it leaves the tensor cores
  constexpr float kWeightScale = 16384.0f, kLog2WeightScale = 14.0f;
  extern __shared__ __align__(128) uint8_t shared[];
  const CudaAttention& t = task.common;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, quad = lane % 4;
  const int kv_head = blockIdx.x, tile_index = blockIdx.y, split = blockIdx.z;
  const CudaTile tile = find_tile(t, tile_index, Shape::kRows);
  if (tile.empty()) return;
  const KeyRange range = split_keys(t, tile, split, kKeys);
  if (split >= range.active) return;

  auto* keys = reinterpret_cast<uint16_t*>(shared);
  uint16_t* values = keys + 2 * Shape::kKeyPlane;
  uint16_t* queries = values + 2 * Shape::kValuePlane;
  auto* factors = reinterpret_cast<float*>(queries + 2 * Shape::kQueryPlane);

  const int begin = range.begin, end = range.end;
  const uint8_t* key_base = key_rows(t, tile.run, kv_head);
  const uint8_t* value_base = value_rows(t, tile.run, kv_head);
  const int64_t key_stride = t.args.k_row_bytes, value_stride = t.v_in_k ? key_stride : t.args.v_row_bytes;
  PairBlock<kHead, Shape::kThreads> key_block;
  PairBlock<kValueHead, Shape::kThreads> value_block;
  key_block.load(key_base + begin * key_stride, key_stride, task.aligned, t.dk, end - begin);
  load_query_pairs<kHead>(t, tile, kv_head, warp * 16, 1.0f, queries, queries + Shape::kQueryPlane, factors,
                          [](int row, int column) { return row * Shape::kPitch + column; });
  __syncwarp();  // the factors of the warp's rows are written
  key_block.store(keys, keys + Shape::kKeyPlane);

  // Matrices of an A operand: rows 0–7 and 8–15 of the first 8 columns, then of the next 8.
  const uint32_t query_address = device::shared_address(queries + (warp * 16 + lane % 16) * kPitch + lane / 16 * 8);
  const uint32_t key_address = device::shared_address(keys + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8);
  const uint32_t value_address =
      device::shared_address(values + (lane / 8 % 2 * 8 + lane % 8) * kValuePitch + lane / 16 * 8);
  constexpr uint32_t kQueryRests = 2 * Shape::kQueryPlane, kKeyRests = 2 * Shape::kKeyPlane;
  constexpr uint32_t kValueRests = 2 * Shape::kValuePlane;  // bytes from high parts to rests

  // Positions of this lane's rows g and g + 8; rows past the end use the position of the last row and are never stored.
  int position[2];
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(tile.row_begin + warp * 16 + g + 8 * h, tile.row_end - 1);
    position[h] = tile.run.position + row / t.group;
    factor[h] = factors[warp * 16 + g + 8 * h] * (t.softcap ? 1.0f : kLog2E);
  }
  const int first_position = tile.run.position + min(tile.row_begin + warp * 16, tile.row_end - 1) / t.group;
  const int last_position = tile.run.position + min(tile.row_begin + warp * 16 + 15, tile.row_end - 1) / t.group;

  float sums[kValueTiles][4] = {};
  float best[2] = {minus_infinity(), minus_infinity()}, total[2] = {0, 0};
  for (int first = begin; first < end; first += kKeys) {
    __syncthreads();  // the keys are written, the last values are read
    value_block.load(value_base + first * value_stride, value_stride, task.aligned, t.dv, end - first);

    float scores[kKeyTiles][4] = {}, small[kKeyTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; step += kFoldedSteps) {
      float fresh[kKeyTiles][4] = {};
#pragma unroll
      for (int s = step; s < step + kFoldedSteps; ++s) {
        uint32_t query[4], query_rest[4], query_low[4], key[kKeyTiles / 2][4], key_rest[kKeyTiles / 2][4];
        device::load_matrix_x4(query, query_address + s * 32);
        device::load_matrix_x4(query_rest, query_address + kQueryRests + s * 32);
#pragma unroll
        for (int n = 0; n < kKeyTiles / 2; ++n) {
          const uint32_t at = key_address + (n * 16 * kPitch + s * 16) * 2;
          device::load_matrix_x4(key[n], at);
          device::load_matrix_x4(key_rest[n], at + kKeyRests);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) query_low[j] = device::divide_by_rest_scale(query[j]);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          device::mma_f16(small[n], query_low, key_rest[n / 2][n % 2 * 2], key_rest[n / 2][n % 2 * 2 + 1]);
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          device::mma_f16(fresh[n], query, key[n / 2][n % 2 * 2], key[n / 2][n % 2 * 2 + 1]);
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          device::mma_f16(small[n], query_rest, key[n / 2][n % 2 * 2], key[n / 2][n % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[n][j] += fresh[n][j];
      }
    }
    value_block.store(values, values + Shape::kValuePlane);
    const int next = first + kKeys;
    if (next < end) key_block.load(key_base + next * key_stride, key_stride, task.aligned, t.dk, end - next);

      // Scores in units of log2.
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[n][j] = (scores[n][j] + small[n][j]) * factor[j >> 1];
      }
    }
    if (t.softcap) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[n][j] = t.args.softcap * tanhf(scores[n][j]) * kLog2E;
      }
    }
    const bool edge = first + kKeys > end || first + kKeys - 1 > first_position ||
                      (t.windowed && first <= last_position - t.args.window);
    if (edge) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = first + n * 8 + quad * 2 + (j & 1), distance = position[j >> 1] - key;
          const bool seen = key < end && distance >= 0 && (!t.windowed || distance < t.args.window);
          if (!seen) scores[n][j] = minus_infinity();
        }
      }
    }
    float shrink[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = best[h];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) top = fmaxf(top, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, 2));
      const float base = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are 0
      shrink[h] = device::exp2_fast(best[h] - base);
      best[h] = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          scores[n][e] = device::exp2_fast((scores[n][e] - base) + kLog2WeightScale);
          sum += scores[n][e];
        }
      }
      total[h] = total[h] * shrink[h] + sum;  // over this lane's columns; the quad is summed at the end
    }
    uint32_t weight[kWeightSteps][4], weight_rest[kWeightSteps][4];
#pragma unroll
    for (int k = 0; k < kWeightSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float(&pair)[4] = scores[2 * k + j / 2];
        weight[k][j] = device::split_pair(pair[j % 2 * 2], pair[j % 2 * 2 + 1], 1.0f, weight_rest[k][j]);
      }
    }

    __syncthreads();  // the values are written, the keys are read
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 4) {
      float fresh[4][4] = {};
      uint32_t value[kWeightSteps][2][4];
#pragma unroll
      for (int k = 0; k < kWeightSteps; ++k) {
        uint32_t value_rest[2][4], weight_low[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) weight_low[j] = device::divide_by_rest_scale(weight[k][j]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t at = value_address + (k * 16 * kValuePitch + (n + 2 * i) * 8) * 2;
          device::load_matrix_x4_transposed(value_rest[i], at + kValueRests);
          device::load_matrix_x4_transposed(value[k][i], at);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          device::mma_f16(fresh[i], weight_low, value_rest[i / 2][i % 2 * 2], value_rest[i / 2][i % 2 * 2 + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          device::mma_f16(fresh[i], weight_rest[k], value[k][i / 2][i % 2 * 2], value[k][i / 2][i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int k = 0; k < kWeightSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          device::mma_f16(fresh[i], weight[k], value[k][i / 2][i % 2 * 2], value[k][i / 2][i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[n + i][j] = sums[n + i][j] * shrink[j >> 1] + fresh[i][j];
      }
    }
    if (next < end) key_block.store(keys, keys + Shape::kKeyPlane);
  }

  const bool whole = range.active == 1;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] += __shfl_xor_sync(device::kFullMask, total[h], 1);
    total[h] += __shfl_xor_sync(device::kFullMask, total[h], 2);
    total[h] /= kWeightScale;
    best[h] /= kLog2E;  // partial results and sinks are in units of e
    const int row = warp * 16 + g + 8 * h;
    if (row >= tile.rows()) continue;
    float* out = whole ? output_row(t, tile, tile.row_begin + row, kv_head)
                       : batch_partial_row(t, tile, kv_head, split, row) + 2;
    const float last =
        (whole ? output_factor(t, tile.row_begin + row, kv_head, best[h], total[h]) : 1.0f) / kWeightScale;
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const int d = n * 8 + quad * 2;
      if (d < t.dv) out[d] = sums[n][2 * h] * last;
      if (d + 1 < t.dv) out[d + 1] = sums[n][2 * h + 1] * last;
    }
    if (!whole && quad == 0) out[-2] = best[h], out[-1] = total[h];
  }
  if (whole) return;
  const int64_t step = int64_t{t.tokens} * t.group * (2 + t.dv);
  combine_parts(t, tile, tile_index, kv_head, range.active, step,
                [&](int row) { return batch_partial_row(t, tile, kv_head, 0, row); });
}

}  // namespace dyno::ops
