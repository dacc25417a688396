// CUDA kernels of norm_route.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// Tokens of a launch: each has a counter and a row of blocks.
inline constexpr int64_t kNormRouteMaxTokens = 64;

// Both need experts * m floats of workspace.
void norm_route_rows_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int rows, int warps,
                          CudaStream& stream);
void norm_route_stripe_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int warps, CudaStream& stream);

}  // namespace dyno::ops
