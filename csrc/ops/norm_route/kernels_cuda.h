// CUDA kernels of norm_route.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// Maximum tokens of a launch: each has a counter and a row of blocks.
inline constexpr int64_t kNormRouteMaxTokens = 64;

// Both need experts * m floats of workspace.
void norm_route_rows_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int rows, int warps,
                          CudaStream& stream);
void norm_route_stripe_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int warps, CudaStream& stream);

// ---- With clusters (norm_route_cluster.cu) -----------------------------------------------------------------------

inline constexpr int kRouteClusterBlocks = 8;
inline constexpr int64_t kRouteClusterMaxK = 8192;  // the row is in shared memory
inline constexpr int64_t kRouteClusterMaxExperts = 256;
// Router rows per block; router rows per warp, which reads the token once for all of them; warps that share those rows.
constexpr int64_t route_cluster_rows(int64_t experts) {
  return (experts + kRouteClusterBlocks - 1) / kRouteClusterBlocks;
}
inline constexpr int kRouteWarpRows = 4;
constexpr int route_cluster_parts(int64_t experts, int warps) {
  const int64_t groups = (route_cluster_rows(experts) + kRouteWarpRows - 1) / kRouteWarpRows;
  int parts = warps;
  while (parts > 1 && parts * groups > warps) parts /= 2;
  return parts;
}
void norm_route_cluster_cuda(const NormRouteArgs& args, const NormRouteDesc& desc, int warps, CudaStream& stream);

}  // namespace dyno::ops
