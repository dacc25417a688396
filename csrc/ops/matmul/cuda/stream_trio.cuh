// `stream` for one row of x and three stripes for each two blocks, as stream_row.cuh for one or two stripes of a block.
//
// Each of a pair of blocks has a stripe, and half of the rows of the one between them: rows 0 to 3 and 8 to 11, or the
// others. The bytes of these rows belong to 16 adjacent lanes. So lanes 0 to 15 of a warp have one unit of them, and
// lanes 16 to 31 have the unit that the warp multiplies next. The blocks exchange nothing. They are faster if two
// stripes for each block leave multiprocessors without work, and one for each would leave few warps for a stripe.
#pragma once

#include <cuda_runtime.h>

#include "device/arithmetic.cuh"
#include "device/dependent.cuh"
#include "ops/matmul/cuda/row_codes.cuh"
#include "ops/matmul/cuda/stream_row.cuh"
#include "ops/matmul/cuda/stream_target.cuh"

namespace dyno::ops::cuda {

inline constexpr int kTrioRows = kGpuRows + kGpuRows / 2;  // of w, for a block

template <DType kType>
__device__ __forceinline__ void stream_trio_block(const Problem& p, const StreamTarget& target) {
  using Unit = RowUnit<kType>;
  __shared__ float all_sums[kRowMaxWarps][kTrioRows], all_squares[kRowMaxWarps];
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(device::kFullMask, static_cast<int>(threadIdx.x >> 5), 0);  // uniform within the warp
  // Registers, not computed again for each unit.
  int warps = static_cast<int>(blockDim.x >> 5), first_k = RowValues::first_k(lane);
  asm volatile("" : "+r"(warps), "+r"(first_k));
  const int64_t stripe_bytes = gpu_stripe_bytes(kType, p.k);
  const int tiles = (p.k + kGpuTile - 1) / kGpuTile, units = (tiles + kUnitTiles - 1) / kUnitTiles;
  const int stripes = (target.n + kGpuRows - 1) / kGpuRows;
  // The first or the second block of its pair. Stripes after the last one are that one again, and are not stored.
  const int second = target.stripe % 3 / 2, between = target.stripe + 1 - 2 * second;
  const bool later = lane >= 16;                 // has the second of two units
  const int row_lane = lane % 16 + 16 * second;  // whose bytes of the stripe between this lane has

  const int matrix = static_cast<int>(blockIdx.z);
  const auto* x = reinterpret_cast<const float*>(p.x + matrix * p.x_batch_stride);
  const auto ask_for = [&](const float* vector) {  // 64 bytes of the epilogue's inputs
    if (vector != nullptr && threadIdx.x == 0) device::prefetch_l2(vector + target.stripe * kGpuRows);
  };

  // Two units of the block's stripe, and one of the rows between: of either unit, by lanes.
  Unit whole[2], half;
  int next = warp;  // the first of the two units to load
  const uint8_t* matrix_bytes = target.w + matrix * p.w_stride;
  typename Unit::Place place = Unit::place(matrix_bytes + min(target.stripe, stripes - 1) * stripe_bytes, warp, lane);
  typename Unit::Place half_place =
      Unit::place(matrix_bytes + min(between, stripes - 1) * stripe_bytes, warp + (later ? warps : 0), row_lane);
  asm volatile("" : "+r"(place.scales), "+r"(half_place.scales));
  const int stride = Unit::stride(warps);  // of a warp's units
  const auto load_whole = [&](Unit& to, int unit) {
    if (unit >= units) return;
    place.second = Unit::second_tile(unit, tiles);
    to.load(place, lane);
    place.codes += stride;
  };
  const auto load_half = [&](int unit) {
    if (unit >= units) return;
    typename Unit::Place at = half_place;
    // Without a second unit, lanes 16 to 31 load the first one, too.
    if (later && unit + warps >= units) at.codes -= stride;
    at.second = Unit::second_tile(later && unit + warps < units ? unit + warps : unit, tiles);
    half.load(at, row_lane);
    half_place.codes += 2 * stride;
  };
  load_whole(whole[0], next);
  load_half(next);
  load_whole(whole[1], next + warps);
  ask_for(target.bias);
  if (p.norm != nullptr && threadIdx.x * 32 < p.k) device::prefetch_l2(p.norm + threadIdx.x * 32);
  device::wait_for_previous();

  RowValues values[2];
  const auto load_x = [&](RowValues& to, int unit) {
    if (unit < units) to.load(x, unit, p.k, first_k);
  };
  load_x(values[0], warp);
  load_x(values[1], warp + warps);

  const typename Unit::Table table;
  const RowLane of_lane(lane);
  float sums[2] = {}, half_sums[2] = {}, squares = 0;
  for (int at = warp; at < units; at += 2 * warps) {
    next = at + 2 * warps;
    RowBytes bytes[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int unit = at + u * warps;
      bytes[u] = RowBytes{};
      if (unit >= units) break;
      if (p.normed) {
        squares += values[u].squares();
        if (p.norm != nullptr) {
          RowValues norm;
          norm.load(p.norm, unit, p.k, first_k);
          values[u].multiply(norm);
        }
      }
      bytes[u] = values[u].template bytes<Unit::kSumsOf>(of_lane);
      load_x(values[u], next + u * warps);  // x comes from L2, and is there before the weights
      whole[u].multiply(bytes[u], table, lane, sums);
      load_whole(whole[u], next + u * warps);
    }
    half.multiply_halves(bytes, at + warps < units, table, lane, half_sums);
    load_half(next);
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int lanes = 1; lanes <= 2; lanes *= 2) {
      sums[r] += __shfl_xor_sync(device::kFullMask, sums[r], lanes);
      half_sums[r] += __shfl_xor_sync(device::kFullMask, half_sums[r], lanes);
    }
    half_sums[r] += __shfl_xor_sync(device::kFullMask, half_sums[r], 16);
    if (lane % 4 == 0) all_sums[warp][lane / 4 + 8 * r] = sums[r];
    if (lane % 4 == 0 && !later) all_sums[warp][kGpuRows + lane / 4 + 4 * r] = half_sums[r];
  }
  if (p.normed) {
    squares = device::warp_sum(squares);
    if (lane == 0) all_squares[warp] = squares;
  }
  // Rows of the block's stripe, then of the one between.
  const int index = static_cast<int>(threadIdx.x), of_half = index - kGpuRows;
  const int row = of_half < 0 ? target.stripe * kGpuRows + index
                              : between * kGpuRows + 4 * second + (of_half & 3) + 8 * (of_half >> 2);
  const bool stores = index < kTrioRows && row < target.n;
  const int64_t y_at = matrix * p.y_batch_stride + row;
  const float base = stores && p.residual != nullptr ? p.residual[y_at] : 0.0f;  // loaded while the block synchronises
  __syncthreads();                                                               // the sums of all warps are written
  if (!stores) return;
  float total = 0, square = 0;
  for (int i = 0; i < warps; ++i) total += all_sums[i][index];
  if (p.normed) {
    for (int i = 0; i < warps; ++i) square += all_squares[i];
    // Two lanes have counted each square.
    total *= device::inverse_root(device::quotient(0.5f * square, static_cast<float>(p.k)) + p.norm_eps);
  }
  if (target.bias != nullptr) total += target.bias[row];
  target.y[y_at] = base + total * p.scale;
}

template <DType kType>
__global__ void __launch_bounds__(32 * kRowMaxWarps, 1) stream_trio_kernel(const __grid_constant__ Problem p) {
  device::let_next_start();
  StreamTarget target;
  stream_target<kTrio>(p, target);
  stream_trio_block<kType>(p, target);
}

}  // namespace dyno::ops::cuda
