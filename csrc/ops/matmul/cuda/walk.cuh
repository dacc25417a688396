// Gated products of few tokens with their experts, and of one token with a shared expert. Blocks of `stream` are short:
// most of their time they wait for the ids of the experts, then for the first weights, then for the last warp. The
// blocks of this kernel stay, and the weights of their next pair of stripes are in flight while they finish one.
//
// An item is a stripe of 16 rows of both matrices of an expert, or of the shared expert; those come first, because
// their weights do not depend on routing. Warps of a block share k in units of 128, as in stream_row.cuh. x comes in
// bytes (byte_rows.h), so a unit takes no conversion.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/common_shared.h"
#include "device/dependent.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/ring_feed.cuh"
#include "ops/matmul/cuda/row_codes.cuh"
#include "ops/matmul/cuda/stream_target.cuh"
#include "ops/matmul/cuda/walk.h"

namespace dyno::ops::cuda {

// Units in flight, as many as a warp's registers allow.
constexpr int walk_depth(DType type) {
  const GpuFormat f = gpu_format(type);
  const int depth = 56 / ((2 * f.bits() + 3) * 2 + 4);
  return depth < 1 ? 1 : depth > 2 ? 2 : depth;
}

// Maximum items of a block. It keeps the sums of its warps until the end, so that they never wait for each other
// before.
inline constexpr int kWalkKept = 8;
inline constexpr int kWalkSums = 2 * kGpuRows;  // floats of a warp and an item
static_assert(kWalkSums == 32, "a lane adds the sums of a row of one matrix");

// The items of a launch: `of_pair` stripes of the shared expert, then `stripes` for each row with an expert.
struct WalkItem {
  int stripe, n;
  int row;  // of y; -1: the shared expert
};
__device__ __forceinline__ WalkItem walk_item(const Problem& p, const SharedPair& pair, int stripes, uint32_t present,
                                              int number) {
  const int of_pair = pair.stripes();
  if (number < of_pair) return {number, pair.n, -1};
  number -= of_pair;
  // Small integers, so the quotient of floats is exact: it is at least half a stripe away from an integer.
  const auto index = static_cast<int>(device::quotient(static_cast<float>(number) + 0.5f, static_cast<float>(stripes)));
  const bool all = (present & (present + 1)) == 0;  // the rows with an expert are the first ones
  return {number - index * stripes, p.n, all ? index : place_of_bit(present, index)};
}

// The weights and the bytes of x that a warp requests, one unit after the other.
template <DType kType>
struct WalkFeed {
  using Unit = RowUnit<kType>;
  struct Slot {
    Unit gate, up;
    RowValues x;
  };

  const Problem& p;
  const SharedPair& pair;
  int warps, warp, lane;
  int tiles, units, x_units, stripes;
  uint32_t present = 0;
  int expert = -1;  // of row number `lane`
  int items;        // that are known
  int item, unit;   // to be requested
  const uint8_t* x = nullptr;
  typename Unit::Place place{};
  const uint8_t* codes_of_up = nullptr;

  __device__ __forceinline__ WalkFeed(const Problem& problem, const SharedPair& shared, int count, int of_warp,
                                      int of_lane)
      : p(problem), pair(shared), warps(count), warp(of_warp), lane(of_lane) {
    asm volatile("" : "+r"(warps));  // a register, not computed again for each unit
    tiles = (p.k + kGpuTile - 1) / kGpuTile, units = (tiles + kUnitTiles - 1) / kUnitTiles;
    x_units = static_cast<int>(byte_row_units(p.k)), stripes = (p.n + kGpuRows - 1) / kGpuRows;
    items = pair.stripes();
    item = static_cast<int>(blockIdx.x), unit = warp;
    if (more()) begin();
  }
  __device__ __forceinline__ bool more() const { return item < items; }
  // Adds the items of the experts. To be called once their ids can be read.
  __device__ __forceinline__ void open_experts() {
    const bool begun = more();
    expert = lane < p.rows ? device::load_l2(p.ids + lane) : -1;
    present = __ballot_sync(device::kFullMask, expert >= 0);
    items += stripes * __popc(present);
    if (!begun && more()) begin();
  }
  __device__ __forceinline__ void load_weights(Slot& to) {
    place.second = Unit::second_tile(unit, tiles);
    const uint8_t* gate = place.codes;
    to.gate.load(place, lane);
    place.codes = codes_of_up;
    to.up.load(place, lane);
    const int stride = Unit::stride(warps);
    place.codes = gate + stride;
    codes_of_up += stride;
  }
  __device__ __forceinline__ void load_x(Slot& to, int at) const {
    to.x.template load_bytes<Unit::kSumsOf>(x, at, x_units, lane);
  }
  __device__ __forceinline__ void advance() {
    unit += warps;
    if (unit < units) return;
    unit = warp;
    item += static_cast<int>(gridDim.x);
    if (more()) begin();
  }

 private:
  __device__ __forceinline__ void begin() {
    const WalkItem at = walk_item(p, pair, stripes, present, item);
    const int64_t from = at.stripe * gpu_stripe_bytes(kType, p.k);
    const uint8_t *gate = pair.w + from, *up = pair.w_up + from;
    x = p.x_bytes;
    if (at.row >= 0) {
      const int64_t matrix = __shfl_sync(device::kFullMask, expert, at.row) * p.w_stride + from;
      gate = p.w + matrix, up = p.w_up + matrix;
      if (at.row >= p.x_divisor) x += at.row / p.x_divisor * byte_row_bytes(p.k);
    }
    place = Unit::place(gate, warp, lane);
    codes_of_up = place.codes + (up - gate);
  }
};

template <DType kType>
__global__ void __launch_bounds__(32 * kWalkMaxWarps, 1)
    walk_kernel(const __grid_constant__ Problem p, const __grid_constant__ SharedPair pair) {
  using Unit = RowUnit<kType>;
  constexpr int kDepth = walk_depth(kType);
  extern __shared__ float walk_sums[];  // [items of the block][warps][gate, up][rows]
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(device::kFullMask, static_cast<int>(threadIdx.x >> 5), 0);  // uniform within the warp
  WalkFeed<kType> feed(p, pair, static_cast<int>(blockDim.x >> 5), warp, lane);
  typename WalkFeed<kType>::Slot ring[kDepth];
  // The weights of the shared expert, before earlier launches end.
  bool early[kDepth];
  int unit_of[kDepth];
#pragma unroll
  for (int u = 0; u < kDepth; ++u) {
    early[u] = feed.more(), unit_of[u] = feed.unit;
    if (!early[u]) continue;
    feed.load_weights(ring[u]);
    feed.advance();
  }
  device::wait_for_previous();
  device::let_next_start();  // the launch that chose the experts is complete: settled, see problem.h
  feed.open_experts();
#pragma unroll
  for (int u = 0; u < kDepth; ++u) {
    if (early[u]) {
      ring[u].x.template load_bytes<Unit::kSumsOf>(p.x_bytes, unit_of[u], feed.x_units, lane);
    } else if (feed.more()) {
      feed.load_weights(ring[u]);
      feed.load_x(ring[u], feed.unit);
      feed.advance();
    }
  }
  for (int row = 0; row < p.rows && __popc(feed.present) < p.rows; ++row) {  // rows without an expert
    if ((feed.present >> row & 1) != 0) continue;
    const int threads = static_cast<int>(gridDim.x * blockDim.x);
    for (int column = blockIdx.x * blockDim.x + threadIdx.x; column < p.n; column += threads) {
      p.y[row * p.y_stride + column] = 0;
    }
  }

  const typename Unit::Table table;
  int item = static_cast<int>(blockIdx.x), unit = warp, kept = 0;
  float gate[2] = {}, up[2] = {};
  while (item < feed.items) {
#pragma unroll
    for (int u = 0; u < kDepth; ++u) {
      if (item >= feed.items) break;
      const RowBytes x = ring[u].x.template converted<Unit::kSumsOf>();
      ring[u].gate.multiply(x, table, lane, gate);
      ring[u].up.multiply(x, table, lane, up);
      if (feed.more()) {
        feed.load_weights(ring[u]);
        feed.load_x(ring[u], feed.unit);
        feed.advance();
      }
      unit += feed.warps;
      if (unit < feed.units) continue;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        gate[r] += __shfl_xor_sync(device::kFullMask, gate[r], 1);
        up[r] += __shfl_xor_sync(device::kFullMask, up[r], 1);
        gate[r] += __shfl_xor_sync(device::kFullMask, gate[r], 2);
        up[r] += __shfl_xor_sync(device::kFullMask, up[r], 2);
        if (lane % 4 == 0) {
          float* sums = walk_sums + (kept * feed.warps + warp) * kWalkSums + lane / 4 + 8 * r;
          sums[0] = gate[r], sums[kGpuRows] = up[r];
        }
        gate[r] = up[r] = 0;
      }
      ++kept;
      unit = warp;
      item += static_cast<int>(gridDim.x);
    }
  }
  // One warp for each item in turn adds the sums of all warps and stores the results.
  __syncthreads();  // the sums are written
  for (int i = warp; i < kept; i += feed.warps) {
    float total = 0;
    for (int w = 0; w < feed.warps; ++w) total += walk_sums[(i * feed.warps + w) * kWalkSums + lane];
    const float of_up = __shfl_xor_sync(device::kFullMask, total, kGpuRows);
    const WalkItem at = walk_item(p, pair, feed.stripes, feed.present, static_cast<int>(blockIdx.x + i * gridDim.x));
    const int row = at.stripe * kGpuRows + lane, of_row = max(at.row, 0);
    const int matrix = __shfl_sync(device::kFullMask, feed.expert, of_row);
    if (lane >= kGpuRows || row >= at.n) continue;
    if (at.row < 0) {
      pair.y[row] = activate(p.activation, total, of_up);
    } else {
      store_gated(p, matrix, row, of_row * p.y_stride + row, total, of_up);
    }
  }
}

template <DType kType>
void launch_walk(const Problem& p, const SharedPair& pair, int warps, int blocks, int multiprocessors,
                 CUstream_st* stream) {
  const int items = pair.stripes() + (p.n + kGpuRows - 1) / kGpuRows * p.rows;
  const int grid = std::max(std::min(items, blocks * multiprocessors), (items + kWalkKept - 1) / kWalkKept);
  const size_t shared = sizeof(float) * kWalkSums * static_cast<size_t>((items + grid - 1) / grid * warps);
  launch_dependent_common("walk", walk_kernel<kType>, dim3(static_cast<unsigned>(grid)),
                          static_cast<unsigned>(32 * warps), 1, shared, stream, has_one_token(p), p, pair);
}

}  // namespace dyno::ops::cuda
