// CUDA kernels of moe_route.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// Maximum of experts that one warp's registers hold.
inline constexpr int64_t kCudaMaxExperts = 1024;

void moe_route_warps_cuda(const MoeRouteArgs& args, const MoeRouteDesc& desc, int warps, CudaStream& stream);

}  // namespace dyno::ops
