// Few tokens: weights are streamed once, and the next tiles are under way while these are used.
//
// A block owns one or two stripes (16 rows of w each; gated: one of each matrix) and up to 8 rows of x; its warps share
// k and meet in shared memory. The product is an MMA whose 8 columns are the rows of x, so up to 8 tokens cost no more
// arithmetic than one. x is normed where asked and turned into halves once a block (stream_rows.cuh). Weights that do
// not depend on what earlier launches write are requested before those have ended.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/stream_rows.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

inline constexpr int kStreamShared = 96 * 1024;  // at most, of a block; longer rows come in passes over parts of k
inline constexpr int kStreamAhead = 16;          // tiles that a warp asks for into L2 before its rows are there

// The product that a block works on.
struct StreamTarget {
  const uint8_t* w;
  const float* bias;
  float* y;
  int64_t y_stride;
  int n, stripe;
};

// kMats: stripes of a block, or the two of a gated pair. kSummed: Grouping::summed, where the rows of a token follow
// each other along k.
template <DType kType, int kMats, bool kSummed>
__device__ __forceinline__ void stream_block(const Problem& p, const StreamTarget& target, int part_tiles) {
  using Tile = WeightTile<kType>;
  constexpr bool kTwice = half_passes(kType) == 2;
  constexpr int kUnroll = kMats == 2 || Tile::kLowWords >= 16 ? 1 : 2;
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const bool gated = p.gated(), experts = p.grouping == Grouping::experts;
  const int stripe = target.stripe;
  const int64_t stripe_bytes = gpu_stripe_bytes(kType, p.k);
  const int tiles = (p.k + kGpuTile - 1) / kGpuTile;

  // Rows of x and y of this block.
  const int first_row = kSummed ? blockIdx.y * p.used : experts ? blockIdx.y : blockIdx.y * 8;
  const int columns = kSummed || experts ? 1 : min(8, p.rows - first_row);  // of the MMA
  StreamRows x{.x = p.x,
               .stride = p.x_stride,
               .rows = kSummed ? p.used : columns,
               .k = p.k,
               .norm = p.norm,
               .normed = p.normed,
               .eps = p.norm_eps};
  x.x += experts ? static_cast<int64_t>(first_row / p.x_divisor) * p.x_stride
                 : blockIdx.z * p.x_batch_stride + first_row * p.x_stride;

  const int row_bytes = static_cast<int>(kSummed ? stream_summed_row_bytes(tiles) : stream_row_bytes(part_tiles));
  uint8_t* rest = shared + x.rows * row_bytes;
  float* all_sums = reinterpret_cast<float*>(shared + (kTwice ? 2 : 1) * x.rows * row_bytes);
  float* stats = all_sums + warps * kMats * kGpuRows * 8;
  float* backs = stats + max(x.rows, warps);

  // This warp's way along k: tiles [at, end) of the matrix of `cursor`.
  typename Tile::Cursor cursor[2] = {{target.w, 0, lane}, {target.w, 0, lane}};
  Tile now[kUnroll][kMats], next[kUnroll][kMats];
  int end = 0;
  const auto load = [&](Tile(&to)[kUnroll][kMats]) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kMats; ++i) {
        if (cursor[i].tile >= end) break;
        to[u][i].load(cursor[i]);
        cursor[i].advance();
      }
    }
  };
  const auto start = [&](int matrix, int begin, int stop) {
    const uint8_t* w = target.w + matrix * p.w_stride + stripe * stripe_bytes;
    cursor[0] = {w, begin, lane};
    if constexpr (kMats == 2) {
      const int stripes = (target.n + kGpuRows - 1) / kGpuRows;
      cursor[1] = {gated ? p.w_up + matrix * p.w_stride + stripe * stripe_bytes
                         : w + (min(stripe + 1, stripes - 1) - stripe) * stripe_bytes,
                   begin, lane};
    }
    end = stop;
    load(now);
    const int ahead = min(stop - begin - kUnroll, kStreamAhead);
    for (int tile = 0; tile < ahead; ++tile) {
#pragma unroll
      for (int i = 0; i < kMats; ++i) cursor[i].prefetch(tile, lane);
    }
  };

  float sums[kMats][4] = {};
  // Multiplies tiles [begin, end) with the halves at `mine`.
  const auto multiply = [&](const uint8_t* mine, int begin) {
    for (int tile = begin; tile < end; tile += kUnroll) {
      load(next);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (tile + u >= end) break;
        const uint4 low = *reinterpret_cast<const uint4*>(mine);
        const uint4 high = *reinterpret_cast<const uint4*>(mine + 16);
        uint4 rest_low{}, rest_high{};
        if constexpr (kTwice) {
          rest_low = *reinterpret_cast<const uint4*>(mine + x.rows * row_bytes);
          rest_high = *reinterpret_cast<const uint4*>(mine + x.rows * row_bytes + 16);
        }
        mine += 128;
        const uint32_t b[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
        const uint32_t left[4][2] = {
            {rest_low.x, rest_low.y}, {rest_low.z, rest_low.w}, {rest_high.x, rest_high.y}, {rest_high.z, rest_high.w}};
        for_each_step([&]<int kStep>() {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < kMats; ++i) {
            now[u][i].template fragment<kStep>(a);
            device::mma_f16(sums[i], a, b[kStep][0], b[kStep][1]);
            if constexpr (kTwice) device::mma_f16(sums[i], a, left[kStep][0], left[kStep][1]);
          }
        });
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < kMats; ++i) now[u][i] = next[u][i];
      }
    }
  };

  int matrix = static_cast<int>(blockIdx.z);
  if constexpr (kSummed) {
    const int total = p.used * tiles, last = total * (warp + 1) / warps;
    int begin = total * warp / warps;
    device::wait_for_previous();
    const auto segment = [&](int at) {
      const int slot = at / tiles;
      start(p.ids[first_row + slot], at - slot * tiles, min(last, (slot + 1) * tiles) - slot * tiles);
    };
    if (begin < last) segment(begin);
    x.gather(stats);
    __syncthreads();  // what warps know of the rows is there
    for (int r = 0; r < x.rows; ++r) {
      float back;
      const float factor = x.factor(stats, r, back);
      x.template halve<kTwice>(r, factor, 0, tiles, shared + r * row_bytes, rest + r * row_bytes);
      if (threadIdx.x == 0) backs[r] = back;
    }
    __syncthreads();  // x is complete
    float total_sums[4] = {};
    while (begin < last) {
      const int slot = begin / tiles;
      multiply(shared + t * 32 + begin * 128, begin - slot * tiles);
      const float weight = p.slot_weights[first_row + slot] * backs[slot];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total_sums[e] += weight * sums[0][e];
        sums[0][e] = 0;
      }
      begin = slot * tiles + end;
      if (begin < last) segment(begin);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[0][e] = total_sums[e];
  } else {
    if (experts) {
      device::wait_for_previous();
      matrix = p.ids[first_row];
    }
    for (int part = 0; part < tiles; part += part_tiles) {
      const int count = min(part_tiles, tiles - part);
      const int begin = part + count * warp / warps;
      start(matrix, begin, part + count * (warp + 1) / warps);
      if (part == 0) {
        if (!experts) device::wait_for_previous();
        x.gather(stats);
      }
      __syncthreads();  // what warps know of the rows is there; all have used the part before
      for (int r = 0; r < columns; ++r) {
        float back;
        const float factor = x.factor(stats, r, back);
        x.template halve<kTwice>(r, factor, part, count, shared + r * row_bytes, rest + r * row_bytes);
        if (threadIdx.x == 0) backs[r] = back;
      }
      __syncthreads();  // x is complete
      // Columns beyond `columns` repeat the last row and are not stored.
      multiply(shared + min(g, columns - 1) * row_bytes + t * 32 + (begin - part) * 128, begin);
    }
  }

  // Element e of `sums` is row g + 8·(e / 2) of the stripe, column 2·t + e % 2.
#pragma unroll
  for (int i = 0; i < kMats; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      all_sums[(warp * kMats + i) * kGpuRows * 8 + (2 * t + e % 2) * kGpuRows + g + 8 * (e / 2)] = sums[i][e];
    }
  }
  __syncthreads();  // the warps' sums are written
  if (threadIdx.x >= kGpuRows * columns) return;
  const int column = threadIdx.x / kGpuRows;
  float total[kMats] = {};
  for (int i = 0; i < warps; ++i) {
#pragma unroll
    for (int mat = 0; mat < kMats; ++mat) total[mat] += all_sums[(i * kMats + mat) * kGpuRows * 8 + threadIdx.x];
  }
  const int row_of_w = stripe * kGpuRows + threadIdx.x % kGpuRows;
  if constexpr (kSummed) {
    if (row_of_w >= p.n) return;
    const int64_t at = blockIdx.y * p.y_stride + row_of_w;
    if (p.bias != nullptr) {
      for (int slot = 0; slot < p.used; ++slot) {
        const int64_t expert = p.ids[first_row + slot];
        total[0] += p.slot_weights[first_row + slot] * p.bias[expert * p.n + row_of_w];
      }
    }
    p.y[at] = (p.residual == nullptr ? 0.0f : p.residual[at]) + p.scale * total[0];
    return;
  }
  const float back = backs[column];
#pragma unroll
  for (int mat = 0; mat < kMats; ++mat) total[mat] *= back;
  const int64_t y_at = (experts ? 0 : matrix * p.y_batch_stride) + (first_row + column) * target.y_stride;
  const int64_t bias_of = experts ? static_cast<int64_t>(matrix) * p.n : 0;
  if constexpr (kMats == 2) {
    if (gated) {
      if (row_of_w < p.n) store_gated(p, experts ? matrix : 0, row_of_w, y_at + row_of_w, total[0], total[1]);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kMats; ++i) {
    const int row = row_of_w + i * kGpuRows;
    if (row >= target.n) continue;
    float sum = total[i];
    if (target.bias != nullptr) sum += target.bias[bias_of + row];
    sum *= p.scale;
    if (p.residual != nullptr) sum += p.residual[y_at + row];
    target.y[y_at + row] = sum;
  }
}

// The product of block blockIdx.x: parts have blocks of their own, one after the other. Its index: 0 is p itself.
template <int kStripes>
__device__ __forceinline__ int stream_target(const Problem& p, StreamTarget& target) {
  constexpr int kRows = kStripes * kGpuRows;
  int block = blockIdx.x, part = 0;
  target = {p.w, p.bias, p.y, p.y_stride, p.n, 0};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int blocks = (target.n + kRows - 1) / kRows;
    if (p.more[i].n == 0 || block < blocks) break;
    block -= blocks;
    target = {p.more[i].w, p.more[i].bias, p.more[i].y, p.more[i].y_stride, p.more[i].n, 0};
    part = i + 1;
  }
  target.stripe = block * kStripes;
  return part;
}

// Types whose tiles take many registers run one block of 16 warps a multiprocessor.
template <DType kType>
constexpr int stream_blocks() {
  return WeightTile<kType>::kLowWords >= 8 || gpu_format(kType).super_block() ? 1 : 2;
}

template <DType kType, int kMats>
__global__ void __launch_bounds__(512, stream_blocks<kType>())
    stream_kernel(const __grid_constant__ Problem p, int part_tiles) {
  device::let_next_start();
  StreamTarget target;
  if (p.gated()) {
    target = {p.w, p.bias, p.y, p.y_stride, p.n, static_cast<int>(blockIdx.x)};
  } else {
    stream_target<kMats>(p, target);
  }
  stream_block<kType, kMats, false>(p, target, part_tiles);
}

template <DType kType>
__global__ void __launch_bounds__(512, stream_blocks<kType>())
    stream_summed_kernel(const __grid_constant__ Problem p, int part_tiles) {
  device::let_next_start();
  stream_block<kType, 1, true>(p, {p.w, p.bias, p.y, p.y_stride, p.n, static_cast<int>(blockIdx.x)}, part_tiles);
}

// Parts of type kOther beside those of p.type.
template <DType kType, DType kOther, int kMats>
__global__ void __launch_bounds__(512, stream_blocks<kType>() < stream_blocks<kOther>() ? stream_blocks<kType>()
                                                                                        : stream_blocks<kOther>())
    stream_mixed_kernel(const __grid_constant__ Problem p, int part_tiles) {
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

// Tiles of k that fit into shared memory at once, and a launch's grid and bytes.
struct StreamLaunch {
  dim3 grid;
  int part_tiles = 0, bytes = 0;
};
inline StreamLaunch stream_launch(const Problem& p, int passes, int warps, int mats, int stripes) {
  const bool experts = p.grouping == Grouping::experts, summed = p.grouping == Grouping::summed;
  const int tiles = (p.k + kGpuTile - 1) / kGpuTile;
  const int x_rows = summed ? p.used : experts ? 1 : std::min(p.rows, 8);
  const auto tail = static_cast<int>(stream_tail_bytes(warps, mats, x_rows));
  const int most = ((std::min(p.shared_limit, kStreamShared) - tail) / (x_rows * passes) - 16) / 128;
  StreamLaunch out;
  out.part_tiles = summed ? tiles : std::min(tiles, most);
  const int64_t row_bytes = summed ? stream_summed_row_bytes(tiles) : stream_row_bytes(out.part_tiles);
  out.bytes = static_cast<int>(x_rows * passes * row_bytes) + tail;
  const auto blocks = [&](int n) { return static_cast<unsigned>((n + stripes * kGpuRows - 1) / (stripes * kGpuRows)); };
  unsigned x = blocks(p.n);
  for (const Part& part : p.more) x += blocks(part.n);
  out.grid = dim3(x,
                  static_cast<unsigned>(summed    ? p.rows / p.used
                                        : experts ? p.rows
                                                  : (p.rows + 7) / 8),
                  static_cast<unsigned>(experts || summed ? 1 : p.matrices));
  return out;
}
template <typename Kernel>
void launch_stream(Kernel kernel, const Problem& p, const StreamLaunch& shape, int warps, CUstream_st* stream) {
  if (shape.bytes > 48 * 1024) {  // more than a block may have unasked
    DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.bytes));
  }
  launch_dependent("stream", kernel, shape.grid, static_cast<unsigned>(32 * warps), static_cast<size_t>(shape.bytes),
                   stream, p, shape.part_tiles);
}

// `stripes`: 1 or 2 of them a block; a gated pair always takes 2, one of each matrix, a sum always 1.
template <DType kType>
void stream(const Problem& p, int warps, int stripes, CUstream_st* cuda_stream) {
  constexpr int kPasses = half_passes(kType);
  if (p.grouping == Grouping::summed) {
    return launch_stream(stream_summed_kernel<kType>, p, stream_launch(p, kPasses, warps, 1, 1), warps, cuda_stream);
  }
  if (p.gated()) {
    return launch_stream(stream_kernel<kType, 2>, p, stream_launch(p, kPasses, warps, 2, 1), warps, cuda_stream);
  }
  const auto kernel = stripes == 2 ? stream_kernel<kType, 2> : stream_kernel<kType, 1>;
  launch_stream(kernel, p, stream_launch(p, kPasses, warps, stripes, stripes), warps, cuda_stream);
}

template <DType kType, DType kOther>
void stream_mixed_pair(const Problem& p, int warps, int stripes, CUstream_st* cuda_stream) {
  static_assert(half_passes(kType) == half_passes(kOther), "rows of x are laid out once");
  const auto kernel = stripes == 2 ? stream_mixed_kernel<kType, kOther, 2> : stream_mixed_kernel<kType, kOther, 1>;
  launch_stream(kernel, p, stream_launch(p, half_passes(kType), warps, stripes, stripes), warps, cuda_stream);
}

}  // namespace dyno::ops::cuda
