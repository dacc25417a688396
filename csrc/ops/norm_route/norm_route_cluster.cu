// Norm, router and routing of a token by one cluster of eight blocks. Router rows are in registers before the launch
// before this one has ended; the products meet in the first block's shared memory, which takes a fraction of the time
// that counting blocks in memory does.
#include <cuda_runtime.h>

#include "core/cuda/launch_cluster.h"
#include "device/cluster_shared.cuh"
#include "device/dependent.cuh"
#include "device/ptx.cuh"
#include "ops/moe_route/route.cuh"
#include "ops/norm_route/kernels_cuda.h"

namespace dyno::ops {
namespace {

constexpr int kMaxWarps = 16;
[[maybe_unused]] constexpr int kRows = kRouteWarpRows;  // not in code for chips without clusters, nor are the functions

struct ClusterTask {
  NormRouteArgs args;
  MoeRouteDesc desc;
  int k;
  int rows;   // of the router, for each block
  int parts;  // warps that share kRows of them
  bool vector;
};

[[maybe_unused]] __device__ __forceinline__ float4 load_quad(const float* row, int quad, bool vector) {
  if (vector) return reinterpret_cast<const float4*>(row)[quad];
  const float* p = row + 4 * quad;
  return make_float4(p[0], p[1], p[2], p[3]);
}
[[maybe_unused]] __device__ __forceinline__ float dot(const float4& a, const float4& b) {
  return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

// kQuads: of a router row, for each lane. kPerLane: experts of a lane that chooses.
template <int kQuads, int kPerLane>
__global__ void __launch_bounds__(32 * kMaxWarps) norm_route_cluster(const __grid_constant__ ClusterTask t) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) float shared[];  // the row, scaled by the norm's weights; what routing needs
  __shared__ float squares[kMaxWarps];
  // [part][expert], of the first block. A block's parts times its rows are at most kRows * kMaxWarps.
  __shared__ float products[kRouteClusterBlocks * kRows * kMaxWarps];
  device::let_next_start();
  device::cluster_arrive();  // this block runs: its memory may be written
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, threads = blockDim.x;
  const int token = blockIdx.x, rank = device::block_of_cluster(), experts = static_cast<int>(t.desc.experts);
  const int part = warp % t.parts, first = warp / t.parts * kRows, expert = rank * t.rows + first;
  const int works = min(min(t.rows - first, experts - expert), kRows);  // rows of this warp; none or less: no work
  const int quads = t.k / 4;
  auto* row = reinterpret_cast<float4*>(shared);

  const auto quad_of = [&](int j) { return (j * t.parts + part) * 32 + lane; };
  float4 weights[kRows][kQuads];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float* w = static_cast<const float*>(t.args.w) + int64_t{r < works ? expert + r : 0} * t.k;
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      const int quad = quad_of(j);
      weights[r][j] = r < works && quad < quads ? load_quad(w, quad, t.vector) : make_float4(0, 0, 0, 0);
    }
  }
  for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += threads) {
    row[quad] = t.args.norm == nullptr ? make_float4(1, 1, 1, 1) : load_quad(t.args.norm, quad, t.vector);
  }
  float bias[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    bias[i] = rank == 0 && warp == 0 && t.args.bias != nullptr && id < experts ? t.args.bias[id] : 0.0f;
  }
  device::wait_for_previous();

  const float* x = t.args.x + token * t.args.x_stride;
  float sum = 0;
  for (int quad = static_cast<int>(threadIdx.x); quad < quads; quad += threads) {  // each thread its own of before
    const float4 in = load_quad(x, quad, t.vector), gain = row[quad];
    sum += dot(in, in);
    row[quad] = make_float4(in.x * gain.x, in.y * gain.y, in.z * gain.z, in.w * gain.w);
  }
  sum = device::warp_sum(sum);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();  // the row and all warps' sums are written
  float product[kRows] = {};
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int quad = quad_of(j);
    if (quad >= quads) break;
    const float4 in = row[quad];
#pragma unroll
    for (int r = 0; r < kRows; ++r) product[r] += dot(weights[r][j], in);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) product[r] = device::warp_sum(product[r]);
  device::cluster_wait();  // all blocks run
  if (lane == 0) {
    const uint32_t to = device::shared_address(products + part * experts + max(expert, 0));
    const uint32_t there = device::cluster_address(to, 0);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r < works) device::store_cluster_float(there + r * sizeof(float), product[r]);
    }
  }
  device::cluster_arrive();
  float total = 0;
  for (int i = 0; i < warps; ++i) total += squares[i];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(t.k) + t.args.eps);
  if (t.args.normed != nullptr) {
    const int begin = t.k * rank / kRouteClusterBlocks, end = t.k * (rank + 1) / kRouteClusterBlocks;
    float* out = t.args.normed + token * t.args.normed_stride;
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += threads) out[i] = shared[i] * scale;
  }
  device::cluster_wait();  // all products are in the first block
  if (rank != 0 || warp != 0) return;
  float logits[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int id = lane + 32 * i;
    float logit = 0;
    for (int p = 0; p < t.parts && id < experts; ++p) logit += products[p * experts + id];
    logits[i] = id < experts ? logit * scale + bias[i] : route::never();
  }
  route::route_token(t.args.route, t.desc, token, logits, shared + t.k);
#endif
}

}  // namespace

void norm_route_cluster_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int warps, CudaStream& stream) {
  const auto aligned = [](const void* p, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(stride * 4)) % 16 == 0;
  };
  const int parts = route_cluster_parts(desc.experts, warps);
  const ClusterTask task{.args = args,
                         .desc = desc.route(),
                         .k = static_cast<int>(desc.k),
                         .rows = static_cast<int>(route_cluster_rows(desc.experts)),
                         .parts = parts,
                         .vector = aligned(args.x, args.x_stride) && aligned(args.norm, 0) && aligned(args.w, desc.k)};
  const size_t shared = static_cast<size_t>(desc.k + route::shared_floats(task.desc)) * sizeof(float);
  const auto pick = [&]<int kPerLane>() {
    const int64_t step = int64_t{128} * parts;  // of a quad for each lane
    return desc.k <= 2 * step ? norm_route_cluster<2, kPerLane> : norm_route_cluster<4, kPerLane>;
  };
  const auto kernel = desc.experts <= 128 ? pick.template operator()<4>() : pick.template operator()<8>();
  launch_dependent_cluster("norm_route", kernel, dim3(static_cast<unsigned>(desc.m), 1, kRouteClusterBlocks),
                           static_cast<unsigned>(32 * warps), kRouteClusterBlocks, shared, stream.handle, task);
}

}  // namespace dyno::ops
