// The epilogue of a gated product of gemm_codes.cuh whose y is written as HalfTiles for the next product.
#pragma once

#include "device/cluster_shared.cuh"
#include "device/wgmma.cuh"
#include "ops/half_tiles.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/gemm_ring.h"

namespace dyno::ops::cuda {

#ifdef DYNO_DEVICE_WGMMA

// A block has kColumns adjacent columns of y for its share of the tokens. The blocks that together have 256 adjacent
// columns, and the blocks that share k, form one cluster. They exchange the largest value of each token, which
// determines the scale.
template <int kTokens, int kWarps, int kStripes>
struct CodesTiles {
  static constexpr int kColumns = kGpuRows * kWarps * kStripes / 2, kJoint = HalfTiles::kBlock / kColumns;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kQuads = kColumns / 4;                // groups of four adjacent values of y, one thread each
  static constexpr int kMost = kTokens * kQuads / kThreads;  // per thread
  static_assert(kQuads == 16 || kQuads == 32, "a warp has whole rows");

  const Problem& p;
  const TiledRows& format;
  const GemmRingShape& shape;
  int part, joint;  // index among the blocks that share k, and among the blocks that share 256 columns
  uint32_t sums;

  __device__ __forceinline__ CodesTiles(const Problem& problem, const TiledRows& rows, const GemmRingShape& s,
                                        int part_of_k, uint32_t sums_at)
      : p(problem),
        format(rows),
        shape(s),
        part(part_of_k),
        joint(static_cast<int>(blockIdx.y) % kJoint),
        sums(sums_at) {}

  // Four adjacent values of y, from the sums of all blocks that share k.
  __device__ __forceinline__ float4 values(int column, int quad, float scale) const {
    // Each warp has 16 rows of the gate before 16 of the other.
    const uint32_t from = sums + (column * shape.sums_stride + quad / 4 * 32 + quad % 4 * 4) * 4;
    float gate[4] = {}, up[4] = {}, y[4];
#pragma unroll 4
    for (int i = 0; i < shape.parts; ++i) {
      const uint32_t at = device::cluster_address(from, i * kJoint + joint);
      const float4 v = device::load_cluster_float4(at), w = device::load_cluster_float4(at + kGpuRows * 4);
      gate[0] += v.x, gate[1] += v.y, gate[2] += v.z, gate[3] += v.w;
      up[0] += w.x, up[1] += w.y, up[2] += w.z, up[3] += w.w;
    }
    const int row = static_cast<int>(blockIdx.y) * kColumns + quad * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float bias = p.bias == nullptr ? 0.0f : p.bias[row + i];
      const float bias_up = p.bias_up == nullptr ? 0.0f : p.bias_up[row + i];
      y[i] = activate(p.activation, fmaf(gate[i], scale, bias), fmaf(up[i], scale, bias_up));
    }
    return make_float4(y[0], y[1], y[2], y[3]);
  }

  // The complete epilogue. All threads of all blocks of the cluster must call it after they have written their sums.
  __device__ __forceinline__ void finish() const {
    __shared__ float largest[kTokens];
    const int share = kTokens / shape.parts, items = share * kQuads, first = blockIdx.x * kTokens;
    const float* scales = reinterpret_cast<const float*>(p.x + format.scales_at()) + first;
    float4 y[kMost];
    float scale[kMost];
    const auto column_of = [&](int i) { return part * share + static_cast<int>(threadIdx.x + i * kThreads) / kQuads; };
    const int quad = static_cast<int>(threadIdx.x) % kQuads;  // the same for all items of a thread, because kThreads is
                                                              // a multiple of kQuads
    // Only whole warps have no item, because a share has at least 32.
    const auto there = [&](int i) { return static_cast<int>(threadIdx.x) + i * kThreads < items; };
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      scale[i] = there(i) && first + column_of(i) < p.rows ? scales[column_of(i)] : 0.0f;
    }
    if (shape.parts == 1) {
      __syncthreads();  // the sums of this block are written
    } else {
      device::cluster_arrive_shared();
      device::cluster_wait();  // the sums of all blocks are written
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      y[i] = make_float4(0, 0, 0, 0);
      if (!there(i)) continue;
      const int column = column_of(i);
      if (first + column < p.rows) y[i] = values(column, quad, scale[i]);
      float most = fmaxf(fmaxf(fabsf(y[i].x), fabsf(y[i].y)), fmaxf(fabsf(y[i].z), fabsf(y[i].w)));
#pragma unroll
      for (int offset = 1; offset < kQuads; offset *= 2) {
        most = fmaxf(most, __shfl_xor_sync(device::kFullMask, most, offset));
      }
      if (quad == 0) largest[column] = most;
    }
    device::cluster_arrive_shared();
    device::cluster_wait();  // the largest values of all blocks are written
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      float most = 0;
      if (there(i)) {
        const uint32_t from = device::shared_address(largest + column_of(i));
#pragma unroll
        for (int j = 0; j < kJoint; ++j) {
          most = fmaxf(most, device::load_cluster_float(device::cluster_address(from, part * kJoint + j)));
        }
      }
      scale[i] = device::row_scale(most);
    }
    device::cluster_arrive();  // this block no longer reads other blocks of the cluster
    uint8_t* block = reinterpret_cast<uint8_t*>(p.y) +
                     (int64_t{blockIdx.x} * (p.n / HalfTiles::kBlock) + static_cast<int>(blockIdx.y) / kJoint) *
                         (kTokens * HalfTiles::kRowBytes);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (there(i)) put_half_tiles(y[i], scale[i], block, kTokens, column_of(i), joint * kColumns + quad * 4);
    }
    device::cluster_wait();
  }
};

#endif  // DYNO_DEVICE_WGMMA

}  // namespace dyno::ops::cuda
