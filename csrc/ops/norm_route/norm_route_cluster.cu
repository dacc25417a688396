// Norm, router and routing of a token by one cluster of eight blocks. Router rows are in registers before the previous
// launch has ended. After that, every instruction adds to the latency, so there are few. A warp multiplies a part of
// the row by four router rows and sends the sums to the first block, whose barrier counts their bytes. After the first
// cluster barrier, blocks use no other one, because it would flush all their writes, and no block writes the row to
// shared memory.
#include <cuda_runtime.h>

#include <bit>

#include "core/cuda/common_shared.h"
#include "device/bulk_copy.cuh"
#include "device/cluster_shared.cuh"
#include "device/dependent.cuh"
#include "device/mbarrier.cuh"
#include "device/ptx.cuh"
#include "ops/matmul/cuda/row_bytes.cuh"
#include "ops/moe_route/route.cuh"
#include "ops/norm_route/kernels_cuda.h"

namespace dyno::ops {
namespace {

constexpr int kMaxWarps = 16;
[[maybe_unused]] constexpr int kRows = kRouteWarpRows;  // not used in code for chips without clusters, and neither are
                                                        // the functions

struct ClusterTask {
  NormRouteArgs args;
  MoeRouteDesc desc;
  int k;
  int rows;       // of the router, per block
  int groups;     // groups of kRows rows
  int part_bits;  // 1 << part_bits warps share a group
  float inverse_k;
  bool softmax;  // route_softmax() can be used
};

template <bool kVector>
[[maybe_unused]] __device__ __forceinline__ float4 load_quad(const float* row, int quad) {
  if constexpr (kVector) return reinterpret_cast<const float4*>(row)[quad];
  const float* p = row + 4 * quad;
  return make_float4(p[0], p[1], p[2], p[3]);
}
[[maybe_unused]] __device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

// kQuads: per lane, of a router row. kPerLane: experts per lane of the choosing warp. kVector: rows are aligned.
template <int kQuads, int kPerLane, bool kVector>
__global__ void __launch_bounds__(32 * kMaxWarps) norm_route_cluster(const __grid_constant__ ClusterTask t) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ float routing[];  // memory for route_token()
  __shared__ float squares[kMaxWarps];
  // [part][block][row of the block, padded], in the first block. Parts times groups of a block are at most its warps.
  __shared__ __align__(16) float products[kRouteClusterBlocks * kRows * kMaxWarps];
  __shared__ uint64_t arrived;
  device::let_next_start();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = 1 << t.part_bits;
  const int token = blockIdx.x, rank = device::block_of_cluster(), experts = static_cast<int>(t.desc.experts);
  const uint32_t barrier = device::shared_address(&arrived);
  const int padded = t.groups * kRows, all = kRouteClusterBlocks * padded;
  if (rank == 0 && threadIdx.x == 0) {
    device::barrier_init(barrier, 1);
    device::barrier_init_done();
    device::barrier_arrive_for_bytes(barrier, static_cast<uint32_t>(all << t.part_bits) * sizeof(float));
  }
  device::cluster_arrive_relaxed();  // this block runs, and the barrier is initialised

  const int part = warp & (parts - 1), group = warp >> t.part_bits, first = group * kRows;
  const int expert = rank * t.rows + first;
  const int works = min(min(t.rows - first, experts - expert), kRows);  // rows of this warp; 0 or less: no work
  const int quads = t.k / 4;
  const auto quad_of = [&](int j) { return ((j << t.part_bits) + part) * 32 + lane; };
  const float4 zeros = make_float4(0, 0, 0, 0);
  float4 weights[kRows][kQuads], gain[kQuads];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float* w = static_cast<const float*>(t.args.w) + int64_t{r < works ? expert + r : 0} * t.k;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int quad = quad_of(j);
      weights[r][j] = r < works && quad < quads ? load_quad<kVector>(w, quad) : zeros;
    }
  }
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    gain[j] = make_float4(1, 1, 1, 1);
    if (t.args.norm != nullptr && quad_of(j) < quads) gain[j] = load_quad<kVector>(t.args.norm, quad_of(j));
  }
  // For the choosing warp: biases, and the positions of its experts' products.
  float bias[kPerLane] = {};
  int place[kPerLane] = {};
  const bool chooses = rank == 0 && warp == 0;
  if (chooses) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int id = lane + 32 * i;
      if (id < experts) place[i] = id / t.rows * padded + id % t.rows;
      if (id < experts && t.args.bias != nullptr) bias[i] = t.args.bias[id];
    }
  }
  // The units of the normalised row that this block writes. The first block writes none, because it chooses.
  const int units = static_cast<int>(byte_row_units(t.k));
  const auto first_unit = [&](int block) { return units * max(block - 1, 0) / (kRouteClusterBlocks - 1); };
  const int write_begin = first_unit(rank), write_end = first_unit(rank + 1);
  const float* x = t.args.x + token * t.args.x_stride;
  float* normed = t.args.normed == nullptr ? nullptr : t.args.normed + token * t.args.normed_stride;
  auto* bytes = static_cast<uint8_t*>(t.args.bytes);
  if (bytes != nullptr) bytes += token * byte_row_bytes(t.k);
  const uint32_t to = device::cluster_address(
      device::shared_address(products + part * all + rank * padded + min(first, padded - kRows)), 0);
  const uint32_t to_barrier = device::cluster_address(barrier, 0);
  device::cluster_wait();  // all blocks are running
  device::wait_for_previous();

  float4 in[kQuads];
#pragma unroll
  for (int j = 0; j < kQuads; ++j) in[j] = quad_of(j) < quads ? load_quad<kVector>(x, quad_of(j)) : zeros;
  float sum = 0, product[kRows] = {};
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    sum += dot(in[j], in[j]);
    in[j] = make_float4(in[j].x * gain[j].x, in[j].y * gain[j].y, in[j].z * gain[j].z, in[j].w * gain[j].w);
#pragma unroll
    for (int r = 0; r < kRows; ++r) product[r] += dot(weights[r][j], in[j]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) product[r] = device::warp_sum(product[r]);
  if (lane == 0 && group < t.groups) {
    device::send_cluster_float4(to, make_float4(product[0], product[1], product[2], product[3]), to_barrier);
  }
  sum = device::warp_sum(sum);
  if (lane == 0 && group == 0) squares[part] = sum;
  __syncthreads();  // the squares of all parts are written
  if (group != 0) return;
  float total = squares[0];
  for (int p = 1; p < parts; ++p) total += squares[p];
  const float scale = rsqrtf(total * t.inverse_k + t.args.eps);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int unit = (j << t.part_bits) + part, quad = quad_of(j);
    if (unit < write_begin || unit >= write_end) continue;
    const float4 out = make_float4(in[j].x * scale, in[j].y * scale, in[j].z * scale, in[j].w * scale);
    if (bytes != nullptr) cuda::store_byte_unit(bytes, units, unit, out, lane);
    if (normed == nullptr || quad >= quads) continue;
    if constexpr (kVector) {
      reinterpret_cast<float4*>(normed)[quad] = out;
    } else {
      float* p = normed + 4 * quad;
      p[0] = out.x, p[1] = out.y, p[2] = out.z, p[3] = out.w;
    }
  }
  if (!chooses) return;
  device::barrier_wait(barrier, 0);  // all products have arrived
  float logits[kPerLane] = {};
#pragma unroll 4
  for (int p = 0; p < parts; ++p) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) logits[i] += products[p * all + place[i]];
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    logits[i] = lane + 32 * i < experts ? logits[i] * scale + bias[i] : route::never();
  }
  if (t.softmax) {
    route::route_softmax(t.args.route, t.desc, token, logits);
  } else {
    route::route_token(t.args.route, t.desc, token, logits, routing);
  }
#endif
}

}  // namespace

void norm_route_cluster_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int warps, CudaStream& stream) {
  const auto aligned = [](const void* p, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(stride * 4)) % 16 == 0;
  };
  const int parts = route_cluster_parts(desc.experts, warps);
  const int64_t rows = route_cluster_rows(desc.experts);
  const ClusterTask task{.args = args,
                         .desc = desc.route(),
                         .k = static_cast<int>(desc.k),
                         .rows = static_cast<int>(rows),
                         .groups = static_cast<int>((rows + kRouteWarpRows - 1) / kRouteWarpRows),
                         .part_bits = std::countr_zero(static_cast<unsigned>(parts)),
                         .inverse_k = 1.0f / static_cast<float>(desc.k),
                         .softmax = route::takes_softmax(desc.route(), args.route)};
  const bool vector = aligned(args.x, args.x_stride) && aligned(args.norm, 0) && aligned(args.w, desc.k) &&
                      aligned(args.normed, args.normed_stride);
  const size_t shared = static_cast<size_t>(route::shared_floats(task.desc)) * sizeof(float);
  const auto pick = [&]<int kPerLane>() {
    const int64_t step = int64_t{128} * parts;  // one quad per lane
    if (!vector) return norm_route_cluster<4, kPerLane, false>;
    return desc.k <= 2 * step ? norm_route_cluster<2, kPerLane, true> : norm_route_cluster<4, kPerLane, true>;
  };
  const auto kernel = desc.experts <= 128 ? pick.template operator()<4>() : pick.template operator()<8>();
  launch_dependent_common("norm_route", kernel, dim3(static_cast<unsigned>(desc.m), 1, kRouteClusterBlocks),
                          static_cast<unsigned>(32 * warps), kRouteClusterBlocks, shared, stream.handle, desc.m == 1,
                          task);
}

}  // namespace dyno::ops
