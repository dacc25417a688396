// Dense products with float32 weights for many tokens on tensor cores: the routers of mixtures of experts, with few
// rows of w and a long k. Every number is a tf32 pair, which has the range of float32: the nearest value with 11
// significant bits, and the rest, of which the tensor cores read 11 more bits. Of the four products of two pairs, the
// smallest is omitted. Sums stay in tensor cores for 32 k. The blocks of a cluster share k, and sums are added in the
// order of the blocks.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/check.h"
#include "core/cuda/launch_cluster.h"
#include "device/cluster_shared.cuh"
#include "device/dependent.cuh"
#include "device/ptx.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/tf32_pairs.h"

namespace dyno::ops::cuda {
namespace {

constexpr int kPairStages = 3, kPairK = 32, kPairRowBytes = kPairK * 4;

// A warp has 32 rows of x by 32 rows of w.
template <int kColumns, int kWarps>
struct PairBlock {
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kAcross = kColumns / 32, kRows = kWarps / kAcross * 32;
  static constexpr int kStageBytes = (kRows + kColumns) * kPairRowBytes;
  static constexpr int kStride = kColumns + 4;  // for sums
  static constexpr int kBytes = std::max(kPairStages * kStageBytes, kRows* kStride * 4);
};

#if __CUDA_ARCH__ >= 900

struct Pair {
  uint32_t high, rest;
  __device__ __forceinline__ explicit Pair(float v) {
    high = (__float_as_uint(v) + 0x1000u) & 0xffffe000u;
    rest = __float_as_uint(v - __uint_as_float(high));
  }
};

// c[16, 8] += a[16, 8] · b[8, 8], tf32 with float32 sums.
__device__ __forceinline__ void mma_tf32(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16-byte chunk `chunk` of row `row` of a stage; the four lanes of two adjacent rows use different banks.
__device__ __forceinline__ uint32_t chunk_at(int row, int chunk) {
  return row * kPairRowBytes + ((chunk ^ (row & 1) << 2) << 4);
}

// Copies the rows of x, then the rows of w, of one step of 32 k. Rows that do not exist are zeros.
template <int kColumns, int kWarps>
struct PairCopies {
  using Block = PairBlock<kColumns, kWarps>;
  static constexpr int kThreads = Block::kThreads;
  static constexpr int kCount = (Block::kRows + kColumns) * 8 / kThreads;
  static_assert(kCount * kThreads == (Block::kRows + kColumns) * 8);
  const uint8_t* from[kCount];
  uint32_t valid = 0;
  bool aligned;

  __device__ __forceinline__ PairCopies(const Problem& p, int first_row, int first_w, bool is_aligned)
      : aligned(is_aligned) {
    const int chunk = threadIdx.x % 8;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = threadIdx.x / 8 + i * (kThreads / 8);
      const int row = at < Block::kRows ? first_row + at : first_w + at - Block::kRows;
      const int rows = at < Block::kRows ? p.rows : p.n;
      if (row < rows) valid |= 1u << i;
      const int64_t there = min(row, rows - 1);
      from[i] = (at < Block::kRows ? p.x + there * p.x_stride : p.w + there * p.k * 4) + chunk * 16;
    }
  }
  __device__ __forceinline__ void issue(uint8_t* stage, int step) const {
    const int64_t skipped = static_cast<int64_t>(step) * kPairRowBytes;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint8_t* to = stage + chunk_at(threadIdx.x / 8 + i * (kThreads / 8), threadIdx.x % 8);
      const bool there = valid >> i & 1;
      if (aligned) {
        device::copy_async_16(device::shared_address(to), from[i] + skipped, there);
      } else {
        const auto* values = reinterpret_cast<const float*>(from[i] + skipped);
        *reinterpret_cast<float4*>(to) =
            there ? make_float4(values[0], values[1], values[2], values[3]) : make_float4(0, 0, 0, 0);
      }
    }
  }
};

#endif

template <int kColumns, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    tf32_pairs_kernel(const __grid_constant__ Problem p, int parts, bool aligned) {
#if __CUDA_ARCH__ >= 900
  using Block = PairBlock<kColumns, kWarps>;
  constexpr int kThreads = Block::kThreads;
  device::let_next_start();
  device::wait_for_previous();
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int rank = parts > 1 ? device::block_of_cluster() : 0;
  const int first_row = blockIdx.x * Block::kRows, first_w = blockIdx.y * kColumns;
  const int steps = p.k / kPairK, begin = steps * rank / parts, end = steps * (rank + 1) / parts;
  const PairCopies<kColumns, kWarps> copies(p, first_row, first_w, aligned);
#pragma unroll
  for (int s = 0; s < kPairStages - 1; ++s) {
    if (begin + s < end) copies.issue(shared + s * Block::kStageBytes, begin + s);
    device::copy_async_commit();
  }
  const int row_of_x = warp / Block::kAcross * 32 + g, row_of_w = Block::kRows + warp % Block::kAcross * 32 + g;
  float totals[2][4][4] = {};
  for (int step = begin; step < end; ++step) {
    const int at = step - begin, ahead = at + kPairStages - 1;
    device::copy_async_wait<kPairStages - 2>();
    __syncthreads();  // the step has arrived for all threads, and none reads the stage that is filled next
    if (begin + ahead < end) copies.issue(shared + ahead % kPairStages * Block::kStageBytes, begin + ahead);
    device::copy_async_commit();
    const uint8_t* stage = shared + at % kPairStages * Block::kStageBytes;
    float sums[2][4][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A lane's four adjacent k are in two products; any order of k is correct if both operands use it.
      float4 x[2][2], w[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[i][r] = *reinterpret_cast<const float4*>(stage + chunk_at(row_of_x + 16 * i + 8 * r, 4 * half + t));
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[j] = *reinterpret_cast<const float4*>(stage + chunk_at(row_of_w + 8 * j, 4 * half + t));
      }
#pragma unroll
      for (int pass = 0; pass < 2; ++pass) {
        const auto pair_of = [&](const float4& v, int which) {
          return Pair(pass == 0 ? (which == 0 ? v.x : v.y) : (which == 0 ? v.z : v.w));
        };
        const Pair a[2][4] = {{pair_of(x[0][0], 0), pair_of(x[0][1], 0), pair_of(x[0][0], 1), pair_of(x[0][1], 1)},
                              {pair_of(x[1][0], 0), pair_of(x[1][1], 0), pair_of(x[1][0], 1), pair_of(x[1][1], 1)}};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const Pair b[2] = {pair_of(w[j], 0), pair_of(w[j], 1)};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Pair(&v)[4] = a[i];
            mma_tf32(sums[i][j], v[0].rest, v[1].rest, v[2].rest, v[3].rest, b[0].high, b[1].high);
            mma_tf32(sums[i][j], v[0].high, v[1].high, v[2].high, v[3].high, b[0].rest, b[1].rest);
            mma_tf32(sums[i][j], v[0].high, v[1].high, v[2].high, v[3].high, b[0].high, b[1].high);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) totals[i][j][e] += sums[i][j][e];
      }
    }
  }

  __syncthreads();  // no warp reads stages any longer
  auto* all = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* to = all + (row_of_x + 16 * i + 8 * r) * Block::kStride + row_of_w - g - Block::kRows + 8 * j + 2 * t;
        *reinterpret_cast<float2*>(to) = make_float2(totals[i][j][2 * r], totals[i][j][2 * r + 1]);
      }
    }
  }
  if (parts > 1) {
    device::cluster_arrive();
    device::cluster_wait();  // the sums of all blocks are written
  } else {
    __syncthreads();  // all sums are written
  }
  constexpr int kQuads = kColumns / 4;
  const int share = Block::kRows / parts;
  for (int item = threadIdx.x; item < share * kQuads; item += kThreads) {
    const int row = rank * share + item / kQuads, quad = item % kQuads;
    if (first_row + row >= p.rows || first_w + 4 * quad >= p.n) continue;
    const float* mine = all + row * Block::kStride + 4 * quad;
    float sum[4] = {};
    for (int part = 0; part < parts; ++part) {
      const float4 v = parts == 1
                           ? *reinterpret_cast<const float4*>(mine)
                           : device::load_cluster_float4(device::cluster_address(device::shared_address(mine), part));
      sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = first_w + 4 * quad + i;
      if (column < p.n) store_product(p, 0, column, (first_row + row) * p.y_stride + column, sum[i]);
    }
  }
  if (parts > 1) {
    device::cluster_arrive();
    device::cluster_wait();  // no block reads this block's shared memory any longer
  }
#endif
}

template <int kColumns, int kWarps>
void launch_blocks(const Problem& p, int parts, CUstream_st* stream) {
  using Block = PairBlock<kColumns, kWarps>;
  const auto kernel = tf32_pairs_kernel<kColumns, kWarps>;
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Block::kBytes));
  const auto address = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.w);
  const bool aligned = (address | static_cast<uintptr_t>(p.x_stride)) % 16 == 0;
  const dim3 grid(static_cast<unsigned>((p.rows + Block::kRows - 1) / Block::kRows),
                  static_cast<unsigned>((p.n + kColumns - 1) / kColumns), static_cast<unsigned>(parts));
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));  // 16 blocks
  launch_dependent_cluster("matmul", kernel, grid, Block::kThreads, Cluster(static_cast<unsigned>(parts), true),
                           Block::kBytes, stream, p, parts, aligned);
}

// Blocks of half as many rows, if the others would leave multiprocessors idle.
template <int kColumns>
void launch_pairs(const Problem& p, int parts, int multiprocessors, CUstream_st* stream) {
  constexpr int kMost = 8, kRows = PairBlock<kColumns, kMost>::kRows;
  const int blocks = (p.rows + kRows - 1) / kRows * ((p.n + kColumns - 1) / kColumns) * parts;
  const auto launch =
      4 * blocks <= 3 * multiprocessors ? launch_blocks<kColumns, kMost / 2> : launch_blocks<kColumns, kMost>;
  launch(p, parts, stream);
}

}  // namespace

void gemm_tf32_pairs(const Problem& p, int parts, int multiprocessors, CUstream_st* stream) {
  switch (tf32_pairs_columns(p.n)) {
    case 32:
      return launch_pairs<32>(p, parts, multiprocessors, stream);
    case 64:
      return launch_pairs<64>(p, parts, multiprocessors, stream);
    default:
      return launch_pairs<128>(p, parts, multiprocessors, stream);
  }
}

}  // namespace dyno::ops::cuda
