// Flash attention with tensor cores: scores, online softmax and weighted values of a tile of query rows, key block by
// key block, without the score matrix in memory.
//
// A warp has 16 query rows: the fragments of its scores are also the left operand of the second product. The warps of a
// block share key blocks in shared memory. The next keys are loaded during the second product, and the values during
// the first.
//
// Heads are padded with zeros to kHead and flash_value_head(kHead). Rows and key blocks have a fixed assignment, so
// results are bit-exact between runs.
#pragma once

#include <cuda_runtime.h>

#include "device/dependent.cuh"
#include "device/flash.cuh"
#include "ops/attention/flash_task.cuh"

namespace dyno::ops {

template <int kHead, int kRows>
struct Flash {
  static constexpr int kThreads = 32 * (kRows / 16);
  static constexpr int kKeys = flash_keys(kHead);
  static constexpr int kValueHead = flash_value_head(kHead);
  // In f16 values; the padding spreads the 8 rows of a matrix over all banks.
  static constexpr int kPitch = kHead + 8, kValuePitch = kValueHead + 8;
  static constexpr int kKeyHalves = kKeys * kPitch, kTileHalves = kKeyHalves + kKeys * kValuePitch;
  static constexpr bool kQueriesInRegisters = kHead <= 128;
};

// Fills `kKeys` rows of shared memory with the f16 or bf16 values of cache rows first, first + 1, …; zeros from row
// `count` and column `width` on. Asynchronous if the cache has the type of the products.
template <int kHead, bool kBf16, int kKeys, int kThreads>
__device__ __forceinline__ void load_block(uint16_t* out, const uint8_t* rows, int64_t stride, int type, bool aligned,
                                           int width, int count, int thread) {
  constexpr int kPitch = kHead + 8, kChunks = kHead / 8;
  const auto scalar = static_cast<device::Scalar>(type);
  const bool same = scalar == (kBf16 ? device::Scalar::bf16 : device::Scalar::f16);
  if (same && aligned) {
#pragma unroll 4
    for (int i = thread; i < kKeys * kChunks; i += kThreads) {
      const int row = i / kChunks, column = i % kChunks * 8;
      const bool valid = row < count && column < width;
      const uint8_t* from = rows + (valid ? row : 0) * stride + (valid ? column : 0) * 2;
      device::copy_async_16(device::shared_address(out + row * kPitch + column), from, valid);
    }
    return;
  }
#pragma unroll 4
  for (int i = thread; i < kKeys * kHead / 2; i += kThreads) {
    const int row = i / (kHead / 2), column = i % (kHead / 2) * 2;
    float v[2] = {0, 0};
    if (row < count) {
      const uint8_t* from = rows + row * stride;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (column + e >= width) continue;
        v[e] = scalar == device::Scalar::q8_0   ? device::load_scalar<device::Scalar::q8_0>(from, column + e)
               : scalar == device::Scalar::bf16 ? device::load_scalar<device::Scalar::bf16>(from, column + e)
                                                : device::load_scalar<device::Scalar::f16>(from, column + e);
      }
    }
    *reinterpret_cast<uint32_t*>(out + row * kPitch + column) = device::pack2_finite<kBf16>(v[0], v[1]);
  }
}

template <bool kBf16>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    device::mma_bf16(c, a, b0, b1);
  } else {
    device::mma_f16(c, a, b0, b1);
  }
}

template <int kHead, bool kBf16, int kRows>
__global__ void __launch_bounds__(2 * kRows) flash_kernel(const __grid_constant__ FlashTask task) {
  device::let_next_start();
  device::wait_for_previous();
  using Shape = Flash<kHead, kRows>;
  constexpr int kKeys = Shape::kKeys, kPitch = Shape::kPitch, kSteps = kHead / 16, kKeyTiles = kKeys / 8;
  constexpr int kValueHead = Shape::kValueHead, kValuePitch = Shape::kValuePitch, kValueTiles = kValueHead / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  const CudaAttention& t = task.common;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, quad = lane % 4;
  const int kv_head = blockIdx.y;
  const CudaTile tile = find_tile(t, blockIdx.x, kRows);
  if (tile.empty()) return;

  auto* keys = reinterpret_cast<uint16_t*>(shared);
  uint16_t* values = keys + Shape::kKeyHalves;
  uint16_t* queries = keys + Shape::kTileHalves;

  // Scaled queries in the type of the products.
  const float scale = t.query_scale();
  for (int i = threadIdx.x; i < kRows * kHead / 2; i += Shape::kThreads) {
    const int row = i / (kHead / 2), column = i % (kHead / 2) * 2;
    float v[2] = {0, 0};
    if (row < tile.rows()) {
      const float* from = query_row(t, tile, tile.row_begin + row, kv_head);
      if (column < t.dk) v[0] = from[column] * scale;
      if (column + 1 < t.dk) v[1] = from[column + 1] * scale;
    }
    *reinterpret_cast<uint32_t*>(queries + row * kPitch + column) = device::pack2_finite<kBf16>(v[0], v[1]);
  }
  __syncthreads();  // queries are written
  // Matrices of an A operand: rows 0–7 and 8–15 of the first 8 columns, then of the next 8.
  const uint32_t query_address = device::shared_address(queries + (warp * 16 + lane % 16) * kPitch + lane / 16 * 8);
  uint32_t query[Shape::kQueriesInRegisters ? kSteps : 1][4];
  if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) device::load_matrix_x4(query[s], query_address + s * 32);
  }
  const uint32_t key_address = device::shared_address(keys + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8);
  const uint32_t value_address =
      device::shared_address(values + (lane / 8 % 2 * 8 + lane % 8) * kValuePitch + lane / 16 * 8);

  const int begin = tile.key_begin, end = tile.key_end;
  const uint8_t* key_base = key_rows(t, tile.run, kv_head);
  const uint8_t* value_base = value_rows(t, tile.run, kv_head);
  const int64_t value_stride = t.v_in_k ? t.args.k_row_bytes : t.args.v_row_bytes;
  const auto load_keys = [&](int first) {
    load_block<kHead, kBf16, kKeys, Shape::kThreads>(keys, key_base + first * t.args.k_row_bytes, t.args.k_row_bytes,
                                                     task.k_type, task.aligned, t.dk, end - first, threadIdx.x);
    device::copy_async_commit();
  };
  const auto load_values = [&](int first) {
    load_block<kValueHead, kBf16, kKeys, Shape::kThreads>(values, value_base + first * value_stride, value_stride,
                                                          task.v_type, task.aligned, t.dv, end - first, threadIdx.x);
    device::copy_async_commit();
  };

  // Positions of this lane's rows g and g + 8; rows past the end use the position of the last row and are never stored.
  int position[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(tile.row_begin + warp * 16 + g + 8 * h, tile.row_end - 1);
    position[h] = tile.run.position + row / t.group;
  }
  const int first_position = tile.run.position + min(tile.row_begin + warp * 16, tile.row_end - 1) / t.group;
  const int last_position = tile.run.position + min(tile.row_begin + warp * 16 + 15, tile.row_end - 1) / t.group;

  float sums[kValueTiles][4] = {};
  float best[2] = {minus_infinity(), minus_infinity()}, total[2] = {0, 0};

  load_keys(begin);
  load_values(begin);
  for (int first = begin; first < end; first += kKeys) {
    device::copy_async_wait<1>();
    __syncthreads();  // the keys have arrived for all threads
    float scores[kKeyTiles][4] = {};
#ifdef DYNO_CUDA_F16
    uint32_t half_scores[kKeyTiles][2] = {};
#endif
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      uint32_t a[4];
      if constexpr (Shape::kQueriesInRegisters) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = query[s][j];
      } else {
        device::load_matrix_x4(a, query_address + s * 32);
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        uint32_t b[4];
        device::load_matrix_x4(b, key_address + (n * 8 * kPitch + s * 16) * 2);
#ifdef DYNO_CUDA_F16
        if constexpr (!kBf16) {
          device::mma_f16_half_sums(half_scores[n], a, b[0], b[1]);
          device::mma_f16_half_sums(half_scores[n + 1], a, b[2], b[3]);
          continue;
        }
#endif
        mma<kBf16>(scores[n], a, b[0], b[1]);
        mma<kBf16>(scores[n + 1], a, b[2], b[3]);
      }
    }
#ifdef DYNO_CUDA_F16
    if constexpr (!kBf16) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&half_scores[n][h]));
          scores[n][2 * h] = v.x, scores[n][2 * h + 1] = v.y;
        }
      }
    }
#endif
    __syncthreads();  // the keys are read
    if (first + kKeys < end) {
      load_keys(first + kKeys);
    } else {
      device::copy_async_commit();  // an empty group keeps the count correct
    }

    // Scores in units of log2.
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[n][j] = (t.softcap ? t.args.softcap * tanhf(scores[n][j]) : scores[n][j]) * kLog2E;
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = best[h];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) top = fmaxf(top, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(device::kFullMask, top, 2));
      const float base = top == minus_infinity() ? 0.0f : top;  // no key was read yet: all weights are 0
      const float shrink = device::exp2_fast(best[h] - base);
      best[h] = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        scores[n][2 * h] = device::exp2_fast(scores[n][2 * h] - base);
        scores[n][2 * h + 1] = device::exp2_fast(scores[n][2 * h + 1] - base);
        sum += scores[n][2 * h] + scores[n][2 * h + 1];
      }
      total[h] = total[h] * shrink + sum;  // over this lane's columns; the quad is summed at the end
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) sums[n][2 * h] *= shrink, sums[n][2 * h + 1] *= shrink;
    }

    device::copy_async_wait<1>();
    __syncthreads();  // the values have arrived for all threads
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t a[4] = {device::pack2<kBf16>(scores[2 * k][0], scores[2 * k][1]),
                             device::pack2<kBf16>(scores[2 * k][2], scores[2 * k][3]),
                             device::pack2<kBf16>(scores[2 * k + 1][0], scores[2 * k + 1][1]),
                             device::pack2<kBf16>(scores[2 * k + 1][2], scores[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 2) {
        uint32_t b[4];
        device::load_matrix_x4_transposed(b, value_address + (k * 16 * kValuePitch + n * 8) * 2);
        mma<kBf16>(sums[n], a, b[0], b[1]);
        mma<kBf16>(sums[n + 1], a, b[2], b[3]);
      }
    }
    __syncthreads();  // the values are read
    if (first + kKeys < end) {
      load_values(first + kKeys);
    } else {
      device::copy_async_commit();
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] += __shfl_xor_sync(device::kFullMask, total[h], 1);
    total[h] += __shfl_xor_sync(device::kFullMask, total[h], 2);
    best[h] /= kLog2E;  // sinks are in units of e
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp * 16 + g + 8 * h;
    if (row >= tile.rows()) continue;
    float* out = output_row(t, tile, tile.row_begin + row, kv_head);
    const float factor = output_factor(t, tile.row_begin + row, kv_head, best[h], total[h]);
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const int d = n * 8 + quad * 2;
      if (d < t.dv) out[d] = sums[n][2 * h] * factor;
      if (d + 1 < t.dv) out[d + 1] = sums[n][2 * h + 1] * factor;
    }
  }
}

}  // namespace dyno::ops
