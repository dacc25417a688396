// Routing: one warp per token.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/moe_route/kernels_cuda.h"
#include "ops/moe_route/route.cuh"

namespace dyno::ops {
namespace {

template <int kPerLane>
__global__ void __launch_bounds__(128) moe_route_warps(MoeRouteArgs args, MoeRouteDesc desc) {
  device::let_next_start();
  device::wait_for_previous();
  extern __shared__ float shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  if (token >= desc.m) return;
  const float* logits = args.logits + token * desc.experts;
  float logit[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) logit[i] = lane + 32 * i < desc.experts ? logits[lane + 32 * i] : route::never();
  route::route_token(args, desc, token, logit, shared + warp * route::shared_floats(desc));
}

auto kernel_for(int64_t experts) {
  if (experts <= 64) return moe_route_warps<2>;
  if (experts <= 128) return moe_route_warps<4>;
  if (experts <= 256) return moe_route_warps<8>;
  return moe_route_warps<32>;
}

}  // namespace

void moe_route_warps_cuda(const MoeRouteArgs& args, const MoeRouteDesc& desc, int warps, CudaStream& stream) {
  const auto blocks = static_cast<unsigned>((desc.m + warps - 1) / warps);
  const size_t shared = static_cast<size_t>(warps * route::shared_floats(desc)) * sizeof(float);
  launch_dependent("moe_route", kernel_for(desc.experts), blocks, static_cast<unsigned>(warps * 32), shared,
                   stream.handle, args, desc);
}

}  // namespace dyno::ops
