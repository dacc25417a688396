// `stream` for one row of x per matrix: codes and bytes (row_codes.cuh) instead of halves. It takes about a third of
// the instructions, and rounds no weight.
//
// Warps of a block share k in units of 128, which they take in turn: unit `warp`, then `warp` + warps. The weights of
// the next units are in flight while one is multiplied. Each warp reads the parts of x that it needs into registers in
// the order of its operands, so nothing but the sums of the warps goes through shared memory.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/common_shared.h"
#include "device/arithmetic.cuh"
#include "device/dependent.cuh"
#include "ops/matmul/cuda/row_codes.cuh"
#include "ops/matmul/cuda/stream_target.cuh"

namespace dyno::ops::cuda {

inline constexpr int kRowMaxWarps = 16;

// Units in flight for each of a warp's matrices, as many as its registers allow. Codes that are bytes take none to
// unpack.
constexpr int row_depth(DType type, int mats) {
  const GpuFormat f = gpu_format(type);
  const int depth = (f.low_bits == 8 && f.scale == GpuScale::d ? 80 : 48) / ((2 * f.bits() + 3) * mats);
  return depth < 1 ? 1 : depth > 2 ? 2 : depth;
}

// kMats: stripes of a block, or the two stripes of a gated pair. kSummed: Grouping::summed; the units of the experts of
// a token follow each other, and the units of a shared expert come last.
template <DType kType, int kMats, bool kSummed>
__device__ __forceinline__ void stream_row_block(const Problem& p, const StreamTarget& target) {
  using Unit = RowUnit<kType>;
  constexpr int kDepth = row_depth(kType, kMats);
  __shared__ float all_sums[kRowMaxWarps][kMats][kGpuRows], all_squares[kRowMaxWarps];
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(device::kFullMask, static_cast<int>(threadIdx.x >> 5), 0);  // uniform within the warp
  // Registers, not computed again for each unit.
  int warps = static_cast<int>(blockDim.x >> 5), first_k = RowValues::first_k(lane);
  asm volatile("" : "+r"(warps), "+r"(first_k));
  const bool gated = p.gated(), experts = p.grouping == Grouping::experts;
  const int stripe = target.stripe;
  const int64_t stripe_bytes = gpu_stripe_bytes(kType, p.k);
  const int tiles = (p.k + kGpuTile - 1) / kGpuTile, units = (tiles + kUnitTiles - 1) / kUnitTiles;

  // The rows of x and y of this block.
  const int first_row = kSummed ? blockIdx.y * p.used : blockIdx.y;
  const uint8_t* x = p.x + (experts   ? static_cast<int64_t>(first_row / p.x_divisor) * p.x_stride
                            : kSummed ? first_row * p.x_stride
                                      : blockIdx.z * p.x_batch_stride);
  const bool converted = !kSummed && p.x_bytes != nullptr;
  const int byte_units = static_cast<int>(byte_row_units(p.k));
  if (converted) x = p.x_bytes + first_row / p.x_divisor * byte_row_bytes(p.k);
  int matrix = static_cast<int>(blockIdx.z);
  const auto ask_for = [&](const float* vector, int64_t at) {  // 64 bytes of the epilogue's inputs
    if (vector != nullptr && threadIdx.x == 0) device::prefetch_l2(vector + at);
  };
  const auto stripe_of = [&](const uint8_t* w, int of) { return w + of * p.w_stride + stripe * stripe_bytes; };

  const int shared_tiles = kSummed && p.shared.w != nullptr ? (p.shared.k + kGpuTile - 1) / kGpuTile : 0;
  const int total = kSummed ? p.used * units + (shared_tiles + kUnitTiles - 1) / kUnitTiles : units;
  // A unit of the list: of which slot, and where in its row.
  struct Item {
    int index, slot, unit;
  };
  const auto advance = [&](Item& at) {
    at.index += warps;
    at.unit += warps;
    if constexpr (kSummed) {
      while (at.slot < p.used && at.unit >= units) at.unit -= units, ++at.slot;
    }
  };
  const auto first_place = [&] {
    Item at{warp, 0, warp};
    if constexpr (kSummed) {
      while (at.slot < p.used && at.unit >= units) at.unit -= units, ++at.slot;
    }
    return at;
  };

  Unit ring[kDepth][kMats];
  Item next = first_place();
  typename Unit::Place place;              // unless kSummed: of the next unit of the first stripe
  const uint8_t* codes[kMats];             // of all stripes
  const int stride = Unit::stride(warps);  // of a warp's units
  const int stripes = (target.n + kGpuRows - 1) / kGpuRows;
  const int second = min(stripe + 1, stripes - 1) - stripe;  // to the block's second stripe, or to the first one again
  const auto load = [&](Unit(&to)[kMats]) {
    if (next.index >= total) return;
    if constexpr (kSummed) {
      const bool shared = next.slot == p.used;
      const int64_t bytes = shared ? gpu_stripe_bytes(kType, p.shared.k) : stripe_bytes;
      const uint8_t* of_stripe =
          shared ? p.shared.w + stripe * bytes : stripe_of(p.w, device::load_l2(p.ids + first_row + next.slot));
#pragma unroll
      for (int i = 0; i < kMats; ++i) {
        to[i].load(of_stripe + (i == 0 ? 0 : second * bytes), next.unit, shared ? shared_tiles : tiles, lane);
      }
    } else {
      place.second = Unit::second_tile(next.unit, tiles);
#pragma unroll
      for (int i = 0; i < kMats; ++i) {
        place.codes = codes[i];
        to[i].load(place, lane);
        codes[i] += stride;
      }
    }
    advance(next);
  };
  const auto start = [&] {
    if constexpr (!kSummed) {
      const uint8_t* w = stripe_of(target.w, matrix);
      place = Unit::place(w, warp, lane);
      codes[0] = place.codes;
      asm volatile("" : "+r"(place.scales));  // as above
      if constexpr (kMats == 2) {
        const uint8_t* other = gated ? stripe_of(p.w_up, matrix) : w + second * stripe_bytes;
        codes[1] = place.codes + (other - w);
      }
    }
#pragma unroll
    for (int u = 0; u < kDepth; ++u) load(ring[u]);
  };
  if constexpr (kSummed) {
    if (!p.settled) device::wait_for_previous();
    ask_for(p.residual, blockIdx.y * p.y_stride + stripe * kGpuRows);
    start();
    if (p.settled) device::wait_for_previous();
  } else {
    if (experts) {
      device::wait_for_previous();
      device::let_next_start();  // the launch that chose the experts is complete: settled, see problem.h
      matrix = p.ids[first_row];
      if (matrix < 0) return zero_stream<kMats>(p, target, first_row);
    }
    start();
    ask_for(target.bias, (experts ? static_cast<int64_t>(matrix) * p.n : 0) + stripe * kGpuRows);
    if (p.norm != nullptr && threadIdx.x * 32 < p.k) device::prefetch_l2(p.norm + threadIdx.x * 32);
    if (!experts) device::wait_for_previous();
  }

  RowValues values[kDepth];
  float weight[kDepth];
  const auto load_x = [&](RowValues& to, float& of_slot, const Item& item) {
    if (item.index >= total) return;
    const bool shared = kSummed && item.slot == p.used;
    if (converted) {
      to.template load_bytes<Unit::kSumsOf>(x, item.unit, byte_units, lane);
    } else {
      const auto* row = kSummed && !shared ? reinterpret_cast<const float*>(x + item.slot * p.x_stride)
                        : shared           ? p.shared.x + static_cast<int64_t>(blockIdx.y) * p.shared.k
                                           : reinterpret_cast<const float*>(x);
      to.load(row, item.unit, shared ? p.shared.k : p.k, first_k);
    }
    of_slot = kSummed && !shared ? p.slot_weights[first_row + item.slot] : 1.0f;
  };
  Item at = first_place(), ahead = at;
#pragma unroll
  for (int u = 0; u < kDepth; ++u) {
    load_x(values[u], weight[u], ahead);
    advance(ahead);
  }

  const typename Unit::Table table;
  const RowLane of_lane(lane);
  float sums[kMats][2] = {}, squares = 0;
  while (at.index < total) {
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      if (at.index >= total) break;
      if (!kSummed && p.normed) {
        squares += values[u].squares();
        if (p.norm != nullptr) {
          RowValues norm;
          norm.load(p.norm, at.unit, p.k, first_k);
          values[u].multiply(norm);
        }
      }
      RowBytes bytes;
      if (converted) {
        bytes = values[u].template converted<Unit::kSumsOf>();
      } else {
        bytes = values[u].template bytes<Unit::kSumsOf>(of_lane);
      }
      if constexpr (kSummed) bytes.back *= weight[u];
      load_x(values[u], weight[u], next);  // x comes from L2, and is there before the weights
#pragma unroll
      for (int i = 0; i < kMats; ++i) ring[u][i].multiply(bytes, table, lane, sums[i]);
      load(ring[u]);
      advance(at);
    }
  }

#pragma unroll
  for (int i = 0; i < kMats; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[i][r] += __shfl_xor_sync(device::kFullMask, sums[i][r], 1);
      sums[i][r] += __shfl_xor_sync(device::kFullMask, sums[i][r], 2);
      if (lane % 4 == 0) all_sums[warp][i][lane / 4 + 8 * r] = sums[i][r];
    }
  }
  if (!kSummed && p.normed) {
    squares = device::warp_sum(squares);
    if (lane == 0) all_squares[warp] = squares;
  }
  const int row_of_w = stripe * kGpuRows + static_cast<int>(threadIdx.x);
  const int64_t y_at =
      kSummed ? blockIdx.y * p.y_stride : (experts ? 0 : matrix * p.y_batch_stride) + first_row * target.y_stride;
  float base[kMats] = {};  // loaded while the block synchronises
  if (p.residual != nullptr && threadIdx.x < kGpuRows) {
#pragma unroll
    for (int i = 0; i < kMats; ++i) {
      if (row_of_w + i * kGpuRows < target.n) base[i] = p.residual[y_at + row_of_w + i * kGpuRows];
    }
  }
  __syncthreads();  // the sums of all warps are written
  if (threadIdx.x >= kGpuRows) return;
  float result[kMats] = {};
  for (int i = 0; i < warps; ++i) {
#pragma unroll
    for (int mat = 0; mat < kMats; ++mat) result[mat] += all_sums[i][mat][threadIdx.x];
  }
  if (!kSummed && p.normed) {
    float square = 0;
    for (int i = 0; i < warps; ++i) square += all_squares[i];
    // Two lanes have counted each square.
    const float mean = device::quotient(0.5f * square, static_cast<float>(p.k));
    const float factor = device::inverse_root(mean + p.norm_eps);
#pragma unroll
    for (int mat = 0; mat < kMats; ++mat) result[mat] *= factor;
  }
  store_stream<kMats, kSummed>(p, target, matrix, first_row, row_of_w, y_at, base, result);
}

template <DType kType, int kMats>
__global__ void __launch_bounds__(32 * kRowMaxWarps, 1) stream_row_kernel(const __grid_constant__ Problem p) {
  if (p.grouping != Grouping::experts) device::let_next_start();
  StreamTarget target;
  if (p.gated()) {
    target = {p.w, p.bias, p.y, p.y_stride, p.n, static_cast<int>(blockIdx.x)};
  } else {
    stream_target<kMats>(p, target);
  }
  stream_row_block<kType, kMats, false>(p, target);
}

template <DType kType, int kMats>
__global__ void __launch_bounds__(32 * kRowMaxWarps, 1) stream_row_summed_kernel(const __grid_constant__ Problem p) {
  device::let_next_start();
  stream_row_block<kType, kMats, true>(p, {p.w, p.bias, p.y, p.y_stride, p.n, static_cast<int>(blockIdx.x) * kMats});
}

// With parts of type kOther in addition to p.type.
template <DType kType, DType kOther, int kMats>
__global__ void __launch_bounds__(32 * kRowMaxWarps, 1) stream_row_mixed_kernel(const __grid_constant__ Problem p) {
  device::let_next_start();
  StreamTarget target;
  const int part = stream_target<kMats>(p, target);
  const bool other = part > 0 && p.more[part - 1].type == kOther;
  if (other) {
    stream_row_block<kOther, kMats, false>(p, target);
  } else {
    stream_row_block<kType, kMats, false>(p, target);
  }
}

// Whether all products of a launch have one row of x per matrix.
inline bool has_single_rows(const Problem& p) { return p.grouping != Grouping::dense || p.rows == 1; }

// `stripes`: 1 or 2 per block; of a gated pair 1 of each matrix.
template <typename Kernel>
void launch_stream_row(Kernel kernel, const Problem& p, int warps, int stripes, CUstream_st* stream) {
  launch_dependent_common("stream", kernel, stream_grid(p, stripes), static_cast<unsigned>(32 * warps), 1, 0, stream,
                          has_one_token(p), p);
}

}  // namespace dyno::ops::cuda
