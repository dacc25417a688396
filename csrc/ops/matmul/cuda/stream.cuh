// Few tokens: weights are streamed once, with the loads of the next tiles in flight while the current ones are used.
//
// A block has one or two stripes (16 rows of w each; gated: one of each matrix) and up to 8 rows of x. Its warps share
// k and combine once, in shared memory, at the end. The product is an MMA whose 8 columns are the rows of x, so up to 8
// tokens cost no more arithmetic than one. Weights that do not depend on earlier launches are requested before those
// have ended.
//
// Single rows of x are multiplied by codes as bytes (stream_row.cuh), except by floats and by types of some tables.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/arithmetic.cuh"
#include "device/dependent.cuh"
#include "ops/instances.h"
#include "ops/matmul/cuda/stream_row.cuh"
#include "ops/matmul/cuda/stream_rows.cuh"
#include "ops/matmul/cuda/stream_trio.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

inline constexpr int kStreamShared = 96 * 1024;  // maximum per block; longer rows are processed in parts of k
inline constexpr int kStreamAhead = 16;          // prefetch distance into L2, in tiles, before the rows are ready

// kMats: stripes of a block, or the two stripes of a gated pair. kSummed: Grouping::summed, where the rows of a token
// are concatenated along k.
template <DType kType, int kMats, bool kSummed>
__device__ __forceinline__ void stream_block(const Problem& p, const StreamTarget& target, int part_tiles) {
  using Tile = WeightTile<kType>;
  constexpr bool kTwice = half_passes(kType) == 2;
  constexpr int kDepth = stream_depth(kType, kMats);
  extern __shared__ __align__(16) uint8_t raw[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const bool gated = p.gated(), experts = p.grouping == Grouping::experts;
  const int stripe = target.stripe;
  const int64_t stripe_bytes = gpu_stripe_bytes(kType, p.k);
  const int tiles = (p.k + kGpuTile - 1) / kGpuTile;

  // The rows of x and y of this block.
  const int first_row = kSummed ? blockIdx.y * p.used : experts ? blockIdx.y : blockIdx.y * 8;
  const int columns = kSummed || experts ? 1 : min(8, p.rows - first_row);  // of the MMA
  const uint8_t* x = p.x + (experts ? static_cast<int64_t>(first_row / p.x_divisor) * p.x_stride
                                    : blockIdx.z * p.x_batch_stride + first_row * p.x_stride);

  // Per warp: its f16 values, the inverses of their scales, its squares. Per block: sums, 16 x 8 for each warp and
  // matrix.
  const int row_bytes = static_cast<int>(stream_row_bytes(part_tiles)), passes = kTwice ? 2 : 1;
  uint8_t* halves = raw + warp * passes * columns * row_bytes;
  uint8_t* rests = halves + columns * row_bytes;
  float* all_sums = reinterpret_cast<float*>(raw + warps * passes * columns * row_bytes);
  float* all_squares = all_sums + warps * kMats * kGpuRows * 8;  // [warps][8]
  float* backs = all_squares + warps * 8 + warp * 8;
  if (lane < 8) all_squares[warp * 8 + lane] = 0;
  __syncwarp();  // lane 0 adds to them

  // A ring of tiles [at, end) of one matrix.
  typename Tile::Cursor cursor[2] = {{target.w, 0, lane}, {target.w, 0, lane}};
  Tile ring[kDepth][kMats];
  int end = 0;
  const auto load = [&](Tile(&to)[kMats]) {
    if (cursor[0].tile >= end) return;
#pragma unroll
    for (int i = 0; i < kMats; ++i) {
      to[i].load(cursor[i]);
      cursor[i].advance();
    }
  };
  const auto stripe_of = [&](int matrix) { return target.w + matrix * p.w_stride + stripe * stripe_bytes; };
  const auto start = [&](const uint8_t* w, int matrix, int begin, int stop) {
    cursor[0] = {w, begin, lane};
    if constexpr (kMats == 2) {
      const int stripes = (target.n + kGpuRows - 1) / kGpuRows;
      cursor[1] = {gated ? p.w_up + matrix * p.w_stride + stripe * stripe_bytes
                         : w + (min(stripe + 1, stripes - 1) - stripe) * stripe_bytes,
                   begin, lane};
    }
    end = stop;
#pragma unroll
    for (int u = 0; u < kDepth; ++u) load(ring[u]);
    const int ahead = min(stop - begin - kDepth, kStreamAhead);
    for (int tile = 0; tile < ahead; ++tile) {
#pragma unroll
      for (int i = 0; i < kMats; ++i) cursor[i].prefetch(tile, lane);
    }
  };

  float sums[kMats][4] = {}, totals[kMats][4] = {};
  // Multiplies `count` tiles of the ring by this warp's f16 values; count is a multiple of kDepth except at the end.
  const auto multiply = [&](int count) {
    // Columns after `columns` repeat the last row and are not stored.
    const uint8_t* mine = halves + min(g, columns - 1) * row_bytes + t * 32;
    for (int tile = 0; tile < count; tile += kDepth) {
#pragma unroll
      for (int u = 0; u < kDepth; ++u) {
        if (tile + u >= count) break;
        const uint4 low = *reinterpret_cast<const uint4*>(mine);
        const uint4 high = *reinterpret_cast<const uint4*>(mine + 16);
        uint4 rest_low{}, rest_high{};
        if constexpr (kTwice) {
          rest_low = *reinterpret_cast<const uint4*>(mine + columns * row_bytes);
          rest_high = *reinterpret_cast<const uint4*>(mine + columns * row_bytes + 16);
        }
        mine += 128;
        const uint32_t b[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
        const uint32_t left[4][2] = {
            {rest_low.x, rest_low.y}, {rest_low.z, rest_low.w}, {rest_high.x, rest_high.y}, {rest_high.z, rest_high.w}};
        for_each_step([&]<int kStep>() {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < kMats; ++i) {
            ring[u][i].template fragment<kStep>(a);
            device::mma_f16(sums[i], a, b[kStep][0], b[kStep][1]);
            if constexpr (kTwice) device::mma_f16(sums[i], a, left[kStep][0], left[kStep][1]);
          }
        });
        load(ring[u]);
      }
    }
  };
  // Adds the products of tiles [begin, stop): element e of a sum belongs to column 2·t + e % 2.
  const auto add = [&](const uint8_t* from, int k, int begin, int stop, float weight) {
    for (int at = begin; at < stop; at += part_tiles) {
      const int count = min(part_tiles, stop - at);
      if (at > begin) __syncwarp();  // all lanes have finished with the previous part
      for (int r = 0; r < columns; ++r) {
        const StreamRow row{reinterpret_cast<const float*>(from + r * p.x_stride), p.norm, k};
        float squares;
        const float back =
            row.template halve<kTwice>(at, count, halves + r * row_bytes, rests + r * row_bytes, squares);
        if (lane == 0) backs[r] = back, all_squares[warp * 8 + r] += squares;
      }
      __syncwarp();  // the part's f16 values and their scales are written
      multiply(count);
      const float first = weight * backs[min(2 * t, columns - 1)], second = weight * backs[min(2 * t + 1, columns - 1)];
#pragma unroll
      for (int i = 0; i < kMats; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          totals[i][e] += (e % 2 == 0 ? first : second) * sums[i][e];
          sums[i][e] = 0;
        }
      }
    }
  };

  int matrix = static_cast<int>(blockIdx.z);
  const auto ask_for = [&](const float* vector, int64_t at) {  // 64 bytes of the epilogue's inputs
    if (vector != nullptr && threadIdx.x == 0) device::prefetch_l2(vector + at);
  };
  if constexpr (kSummed) {
    // The shared expert's tiles come after the tiles of the slots.
    const int shared_tiles = p.shared.w != nullptr ? (p.shared.k + kGpuTile - 1) / kGpuTile : 0;
    const int total = p.used * tiles + shared_tiles, last = total * (warp + 1) / warps;
    if (!p.settled) device::wait_for_previous();
    bool waits = p.settled;
    ask_for(p.residual, blockIdx.y * p.y_stride + stripe * kGpuRows);
    for (int begin = total * warp / warps; begin < last;) {
      const int slot = min(begin / tiles, p.used), at = begin - slot * tiles;
      const bool shared = slot == p.used;
      const int stop = min(last - slot * tiles, shared ? shared_tiles : tiles);
      __syncwarp();  // all lanes have finished with the previous slot
      start(shared ? p.shared.w + stripe * gpu_stripe_bytes(kType, p.shared.k)
                   : stripe_of(device::load_l2(p.ids + first_row + slot)),
            0, at, stop);
      if (waits) device::wait_for_previous();
      waits = false;
      const auto* row = reinterpret_cast<const uint8_t*>(p.shared.x + static_cast<int64_t>(blockIdx.y) * p.shared.k);
      add(shared ? row : x + slot * p.x_stride, shared ? p.shared.k : p.k, at, stop,
          shared ? 1.0f : p.slot_weights[first_row + slot]);
      begin = slot * tiles + stop;
    }
    if (waits) device::wait_for_previous();
  } else {
    if (experts) {
      device::wait_for_previous();
      device::let_next_start();  // the launch that chose the experts is complete: settled, see problem.h
      matrix = p.ids[first_row];
      if (matrix < 0) {
        zero_stream<kMats>(p, target, first_row);
        return;
      }
    }
    const int begin = tiles * warp / warps, stop = tiles * (warp + 1) / warps;
    start(stripe_of(matrix), matrix, begin, stop);
    ask_for(target.bias, (experts ? static_cast<int64_t>(matrix) * p.n : 0) + stripe * kGpuRows);
    if (p.norm != nullptr && begin * kGpuTile + lane * 32 < min(stop * kGpuTile, p.k)) {
      device::prefetch_l2(p.norm + begin * kGpuTile + lane * 32);
    }
    if (!experts) device::wait_for_previous();
    add(x, p.k, begin, stop, 1.0f);
  }

  // Element e of `totals` is row g + 8·(e / 2) of the stripe, column 2·t + e % 2.
#pragma unroll
  for (int i = 0; i < kMats; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      all_sums[(warp * kMats + i) * kGpuRows * 8 + (2 * t + e % 2) * kGpuRows + g + 8 * (e / 2)] = totals[i][e];
    }
  }
  const int column = threadIdx.x / kGpuRows, row_of_w = stripe * kGpuRows + threadIdx.x % kGpuRows;
  const int64_t y_at = kSummed ? blockIdx.y * p.y_stride
                               : (experts ? 0 : matrix * p.y_batch_stride) + (first_row + column) * target.y_stride;
  float base[kMats] = {};  // loaded while the block synchronises
  if (p.residual != nullptr && column < columns) {
#pragma unroll
    for (int i = 0; i < kMats; ++i) {
      if (row_of_w + i * kGpuRows < target.n) base[i] = p.residual[y_at + row_of_w + i * kGpuRows];
    }
  }
  __syncthreads();  // the sums of all warps are written
  if (column >= columns) return;
  float total[kMats] = {}, squares = 0;
  for (int i = 0; i < warps; ++i) {
#pragma unroll
    for (int mat = 0; mat < kMats; ++mat) total[mat] += all_sums[(i * kMats + mat) * kGpuRows * 8 + threadIdx.x];
    squares += all_squares[i * 8 + column];
  }
  if (p.normed) {
    const float factor = device::inverse_root(device::quotient(squares, static_cast<float>(p.k)) + p.norm_eps);
#pragma unroll
    for (int mat = 0; mat < kMats; ++mat) total[mat] *= factor;
  }
  store_stream<kMats, kSummed>(p, target, matrix, first_row, row_of_w, y_at, base, total);
}

template <DType kType, int kMats>
__global__ void __launch_bounds__(512, 1) stream_kernel(const __grid_constant__ Problem p, int part_tiles) {
  if (p.grouping != Grouping::experts) device::let_next_start();
  StreamTarget target;
  if (p.gated()) {
    target = {p.w, p.bias, p.y, p.y_stride, p.n, static_cast<int>(blockIdx.x)};
  } else {
    stream_target<kMats>(p, target);
  }
  stream_block<kType, kMats, false>(p, target, part_tiles);
}

template <DType kType>
__global__ void __launch_bounds__(512, 1) stream_summed_kernel(const __grid_constant__ Problem p, int part_tiles) {
  device::let_next_start();
  stream_block<kType, 1, true>(p, {p.w, p.bias, p.y, p.y_stride, p.n, static_cast<int>(blockIdx.x)}, part_tiles);
}

// With parts of type kOther in addition to p.type.
template <DType kType, DType kOther, int kMats>
__global__ void __launch_bounds__(512, 1) stream_mixed_kernel(const __grid_constant__ Problem p, int part_tiles) {
  device::let_next_start();
  StreamTarget target;
  const int part = stream_target<kMats>(p, target);
  const bool other = part > 0 && p.more[part - 1].type == kOther;
  if (other) {
    stream_block<kOther, kMats, false>(p, target, part_tiles);
  } else {
    stream_block<kType, kMats, false>(p, target, part_tiles);
  }
}

// Tiles of k that a warp lays out at once, and a launch's grid and shared memory.
struct StreamLaunch {
  dim3 grid;
  int part_tiles = 0, bytes = 0;
};
inline StreamLaunch stream_launch(const Problem& p, int passes, int warps, int mats, int depth, int stripes) {
  const bool experts = p.grouping == Grouping::experts, summed = p.grouping == Grouping::summed;
  const int tiles = (p.k + kGpuTile - 1) / kGpuTile, columns = experts || summed ? 1 : std::min(p.rows, 8);
  // At most a warp's share of k, rounded up to whole cycles of its ring.
  const int shared = summed && p.shared.w != nullptr ? (p.shared.k + kGpuTile - 1) / kGpuTile : 0;
  const int wanted = summed ? std::min((p.used * tiles + shared + warps - 1) / warps, std::max(tiles, shared))
                            : (tiles + warps - 1) / warps;
  const auto tail = static_cast<int>(stream_tail_bytes(warps, mats));
  const int room = (std::min(p.shared_limit, kStreamShared) - tail) / (warps * columns * passes);
  const int most = std::max((room - static_cast<int>(stream_row_bytes(0))) / 128 / depth * depth, depth);
  StreamLaunch out;
  out.part_tiles = std::min(wanted, most);
  out.bytes = static_cast<int>(warps * columns * passes * stream_row_bytes(out.part_tiles)) + tail;
  out.grid = stream_grid(p, stripes);
  return out;
}
template <typename Kernel>
void launch_stream(Kernel kernel, const Problem& p, const StreamLaunch& shape, int warps, CUstream_st* stream) {
  if (shape.bytes > 48 * 1024) {  // more than the default limit of a block
    DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.bytes));
  }
  launch_dependent("stream", kernel, shape.grid, static_cast<unsigned>(32 * warps), static_cast<size_t>(shape.bytes),
                   stream, p, shape.part_tiles);
}

// `stripes`: 1 or 2 per block, or kTrio for each two blocks and one row of x; a gated pair always has 2, one of each
// matrix; a sum of floats always has 1.
template <DType kType>
void stream(const Problem& p, int warps, int stripes, CUstream_st* cuda_stream) {
  constexpr int kPasses = half_passes(kType);
  if (p.grouping == Grouping::summed) {
    if constexpr (!group_built(KernelGroup::experts)) {
      throw_left_out(KernelGroup::experts);
    } else {
      if constexpr (has_block_codes(kType)) {
        const auto kernel = stripes == 2 ? stream_row_summed_kernel<kType, 2> : stream_row_summed_kernel<kType, 1>;
        return launch_stream_row(kernel, p, warps, stripes, cuda_stream);
      } else {
        const StreamLaunch shape = stream_launch(p, kPasses, warps, 1, stream_depth(kType, 1), 1);
        return launch_stream(stream_summed_kernel<kType>, p, shape, warps, cuda_stream);
      }
    }
  }
  if constexpr (has_block_codes(kType)) {
    if (stripes == kTrio) return launch_stream_row(stream_trio_kernel<kType>, p, warps, stripes, cuda_stream);
    if (has_single_rows(p)) {
      const auto kernel = p.gated() || stripes == 2 ? stream_row_kernel<kType, 2> : stream_row_kernel<kType, 1>;
      return launch_stream_row(kernel, p, warps, p.gated() ? 1 : stripes, cuda_stream);
    }
  }
  if (p.gated()) {
    return launch_stream(stream_kernel<kType, 2>, p, stream_launch(p, kPasses, warps, 2, stream_depth(kType, 2), 1),
                         warps, cuda_stream);
  }
  const auto kernel = stripes == 2 ? stream_kernel<kType, 2> : stream_kernel<kType, 1>;
  const int depth = stream_depth(kType, stripes);
  launch_stream(kernel, p, stream_launch(p, kPasses, warps, stripes, depth, stripes), warps, cuda_stream);
}

template <DType kType, DType kOther>
void stream_mixed_pair(const Problem& p, int warps, int stripes, CUstream_st* cuda_stream) {
  static_assert(half_passes(kType) == half_passes(kOther), "rows of x are laid out once");
  if constexpr (has_block_codes(kType) && has_block_codes(kOther)) {
    if (has_single_rows(p)) {
      const auto row =
          stripes == 2 ? stream_row_mixed_kernel<kType, kOther, 2> : stream_row_mixed_kernel<kType, kOther, 1>;
      return launch_stream_row(row, p, warps, stripes, cuda_stream);
    }
  }
  const auto kernel = stripes == 2 ? stream_mixed_kernel<kType, kOther, 2> : stream_mixed_kernel<kType, kOther, 1>;
  const int depth = stream_depth(kType, kOther, stripes);
  launch_stream(kernel, p, stream_launch(p, half_passes(kType), warps, stripes, depth, stripes), warps, cuda_stream);
}

}  // namespace dyno::ops::cuda
