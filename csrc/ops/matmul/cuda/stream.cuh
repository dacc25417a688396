// Few tokens: weights are streamed once, and the next tiles are under way while these are used.
//
// A block owns a pair of stripes (32 rows of w; gated: 16 rows of each matrix) and up to 8 rows of x; its warps share k
// and meet in shared memory. The product is an MMA whose 8 columns are the rows of x, so up to 8 tokens cost no more
// arithmetic than one. x is turned into halves once a block.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.h"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

// Bytes of a row of halves in shared memory: the tiles, and 16 bytes more so that rows start in other banks.
constexpr int stream_row_bytes(int k) { return (k + kGpuTile - 1) / kGpuTile * 128 + 16; }
inline constexpr int kStreamShared = 96 * 1024;  // at most; longer rows come in passes over parts of k

// Floats x[at … at + 3] as halves, zeros from k on; `rest`: what these leave over.
template <bool kRest>
__device__ __forceinline__ uint2 halves_of(const float* x, int at, int k, uint2& rest) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = 0.0f;
  if (at + 4 <= k) {
    const float2 low = *reinterpret_cast<const float2*>(x + at), high = *reinterpret_cast<const float2*>(x + at + 2);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
  const uint2 halves = {device::pack_half2(v[0], v[1]), device::pack_half2(v[2], v[3])};
  if constexpr (kRest) {
    const float2 low = __half22float2(device::as_half2(halves.x)), high = __half22float2(device::as_half2(halves.y));
    rest = {device::pack_half2(v[0] - low.x, v[1] - low.y), device::pack_half2(v[2] - high.x, v[3] - high.y)};
  }
  return halves;
}

// Where the pair of k with number `pair` (k = 2·pair) of a tile stands, so that the 16 values that a lane needs (its t
// of every step) are 32 bytes in a row: t first, then step, then the two registers of B.
__device__ __forceinline__ int x_slot(int pair) {
  const int step = pair >> 3, high = (pair >> 2) & 1, t = pair & 3;
  return t * 8 + step * 2 + high;  // 4-byte words
}

template <DType kType, bool kPair>
__global__ void __launch_bounds__(512, WeightTile<kType>::kLowWords >= 8 || gpu_format(kType).super_block() ? 1 : 2)
    stream_kernel(const Problem p, int part_tiles) {
  using Tile = WeightTile<kType>;
  constexpr int kMats = kPair ? 2 : 1;
  constexpr bool kTwice = half_passes(kType) == 2;
  constexpr int kUnroll = kPair || Tile::kLowWords >= 16 ? 1 : 2;
  extern __shared__ uint8_t x_halves[];
  __shared__ float shared[16][kMats][kGpuRows * 8];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int g = lane >> 2, t = lane & 3;
  const bool gated = p.gated(), experts = p.grouping == Grouping::experts;
  const int stripes = (p.n + kGpuRows - 1) / kGpuRows;
  const int stripe = blockIdx.x * (kPair && !gated ? 2 : 1);

  // Rows of x and the matrix of this block.
  const int first_row = experts ? blockIdx.y : blockIdx.y * 8;
  const int rows = experts ? 1 : min(8, p.rows - first_row);
  const int matrix = experts ? p.ids[first_row] : static_cast<int>(blockIdx.z);
  const uint8_t* x = experts ? p.x + static_cast<int64_t>(first_row / p.x_divisor) * p.x_stride
                             : p.x + matrix * p.x_batch_stride + first_row * p.x_stride;

  const int64_t stripe_bytes = gpu_stripe_bytes(kType, p.k);
  const uint8_t* w[kMats];
  w[0] = p.w + matrix * p.w_stride + stripe * stripe_bytes;
  if constexpr (kPair) {
    w[1] = gated ? p.w_up + matrix * p.w_stride + stripe * stripe_bytes
                 : p.w + matrix * p.w_stride + min(stripe + 1, stripes - 1) * stripe_bytes;
  }

  const int tiles = (p.k + kGpuTile - 1) / kGpuTile;
  const int row_bytes = part_tiles * 128 + 16;
  float sums[kMats][4] = {};
  for (int part = 0; part < tiles; part += part_tiles) {
    const int part_end = min(part + part_tiles, tiles), count = part_end - part;
    const int begin = part + count * warp / warps, end = part + count * (warp + 1) / warps;
    typename Tile::Cursor cursor[2] = {{w[0], begin, lane}, {w[kMats - 1], begin, lane}};
    Tile now[kUnroll][kMats], next[kUnroll][kMats];
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
    load(now);

    if (part > 0) __syncthreads();  // all have used the part before
    for (int row = 0; row < rows; ++row) {
      const float* from = reinterpret_cast<const float*>(x + row * p.x_stride);
      for (int quad = threadIdx.x; quad < count * 16; quad += blockDim.x) {
        uint2 rest;
        const uint2 v = halves_of<kTwice>(from, part * kGpuTile + quad * 4, p.k, rest);
        uint32_t* to = reinterpret_cast<uint32_t*>(x_halves + row * row_bytes) + quad / 16 * 32;
        to[x_slot(quad % 16 * 2)] = v.x;
        to[x_slot(quad % 16 * 2 + 1)] = v.y;
        if constexpr (kTwice) {
          to += rows * row_bytes / 4;
          to[x_slot(quad % 16 * 2)] = rest.x;
          to[x_slot(quad % 16 * 2 + 1)] = rest.y;
        }
      }
    }
    __syncthreads();  // x is complete

    // Columns beyond `rows` repeat the last row and are not stored.
    const uint8_t* mine = x_halves + min(g, rows - 1) * row_bytes + t * 32 + (begin - part) * 128;
    for (int tile = begin; tile < end; tile += kUnroll) {
      load(next);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (tile + u >= end) break;
        const uint4 low = *reinterpret_cast<const uint4*>(mine);
        const uint4 high = *reinterpret_cast<const uint4*>(mine + 16);
        uint4 rest_low{}, rest_high{};
        if constexpr (kTwice) {
          rest_low = *reinterpret_cast<const uint4*>(mine + rows * row_bytes);
          rest_high = *reinterpret_cast<const uint4*>(mine + rows * row_bytes + 16);
        }
        mine += 128;
        const uint32_t b[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
        const uint32_t rest[4][2] = {
            {rest_low.x, rest_low.y}, {rest_low.z, rest_low.w}, {rest_high.x, rest_high.y}, {rest_high.z, rest_high.w}};
        for_each_step([&]<int kStep>() {
          uint32_t a[4];
#pragma unroll
          for (int i = 0; i < kMats; ++i) {
            now[u][i].template fragment<kStep>(a);
            device::mma_f16(sums[i], a, b[kStep][0], b[kStep][1]);
            if constexpr (kTwice) device::mma_f16(sums[i], a, rest[kStep][0], rest[kStep][1]);
          }
        });
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int i = 0; i < kMats; ++i) now[u][i] = next[u][i];
      }
    }
  }

  // Element e of `sums` is row g + 8·(e / 2) of the stripe, column 2·t + e % 2.
#pragma unroll
  for (int i = 0; i < kMats; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) shared[warp][i][(2 * t + e % 2) * kGpuRows + g + 8 * (e / 2)] = sums[i][e];
  }
  __syncthreads();  // the warps' sums are written
  if (threadIdx.x >= kGpuRows * rows) return;
  const int column = threadIdx.x / kGpuRows;
  float total[kMats] = {};
  for (int i = 0; i < warps; ++i) {
#pragma unroll
    for (int mat = 0; mat < kMats; ++mat) total[mat] += shared[i][mat][threadIdx.x];
  }
  const int64_t y_at = (experts ? 0 : matrix * p.y_batch_stride) + (first_row + column) * p.y_stride;
  const int64_t bias_of = experts ? matrix : 0;
  const int row_of_w = stripe * kGpuRows + threadIdx.x % kGpuRows;
  if (gated) {
    if constexpr (kPair) {
      if (row_of_w < p.n) store_gated(p, bias_of, row_of_w, y_at + row_of_w, total[0], total[1]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kMats; ++i) {
    const int row = row_of_w + i * kGpuRows;
    if (row < p.n) store_product(p, bias_of, row, y_at + row, total[i]);
  }
}

// `stripes`: 1 or 2 of them a block; a gated pair always takes 2, one of each matrix.
template <DType kType>
void stream(const Problem& p, int warps, int stripes, CUstream_st* cuda_stream) {
  const bool experts = p.grouping == Grouping::experts;
  const bool pair = p.gated() || stripes == 2;
  const int rows_of_w = p.gated() || stripes == 1 ? kGpuRows : 2 * kGpuRows;
  const int rows = experts ? 1 : p.rows < 8 ? p.rows : 8, tiles = (p.k + kGpuTile - 1) / kGpuTile;
  const int x_rows = rows * half_passes(kType);
  const int most = (kStreamShared / x_rows - 16) / 128, part_tiles = tiles < most ? tiles : most;
  const int bytes = x_rows * (part_tiles * 128 + 16);
  const dim3 grid(static_cast<unsigned>((p.n + rows_of_w - 1) / rows_of_w),
                  static_cast<unsigned>(experts ? p.rows : (p.rows + 7) / 8),
                  static_cast<unsigned>(experts ? 1 : p.matrices));
  const auto kernel = pair ? stream_kernel<kType, true> : stream_kernel<kType, false>;
  if (bytes > 16 * 1024) {  // with its own arrays more than a block may have unasked
    DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  }
  kernel<<<grid, static_cast<unsigned>(32 * warps), static_cast<size_t>(bytes), cuda_stream>>>(p, part_tiles);
}

}  // namespace dyno::ops::cuda
