// One size of shared memory for the launches of a token.
#pragma once

#include "core/cuda/launch_cluster.h"

namespace dyno {

// Of a multiprocessor's largest size of shared memory; a launch's preference. No other of eight percentages helped all
// of five models on an H200 (benchmarks/results/h200_shared_memory.json).
inline constexpr unsigned kCommonSharedPercent = 58;

// launch_dependent_cluster(), or launch_dependent() if the cluster has one block. If `common` is set, a multiprocessor
// has the same size of shared memory as for other such launches. Otherwise the driver chooses 8 to 132 KiB for the
// kernels of a token, each by its own use. A launch with another size than the one before starts later, probably
// because a multiprocessor changes its size only while no block runs there. Not for launches of several tokens, of
// which some become slower. `common` has no effect where launches do not start early.
template <typename... Params, typename... Args>
void launch_dependent_common(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, Cluster cluster,
                             size_t shared_bytes, cudaStream_t stream, bool common, const Args&... args) {
  if (!common || !has_dependent_launch()) {
    if (cluster.blocks == 1) return launch_dependent(op, kernel, grid, block, shared_bytes, stream, args...);
    return launch_dependent_cluster(op, kernel, grid, block, cluster, shared_bytes, stream, args...);
  }
  cudaLaunchAttribute attributes[4]{};
  unsigned count = 0;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[count].id = id;
    return attributes[count++].val;
  };
  add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
#if CUDART_VERSION >= 12060  // some older toolkits lack the attribute
  add(cudaLaunchAttributePreferredSharedMemoryCarveout).sharedMemCarveout = kCommonSharedPercent;
#endif
  if (cluster.blocks > 1) {
    auto& dimension = add(cudaLaunchAttributeClusterDimension).clusterDim;
    dimension.x = 1, dimension.y = cluster.along_y, dimension.z = cluster.blocks;
    add(cudaLaunchAttributeClusterSchedulingPolicyPreference).clusterSchedulingPolicyPreference =
        cluster.spread ? cudaClusterSchedulingPolicySpread : cudaClusterSchedulingPolicyDefault;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op, __FILE__, __LINE__);
}

}  // namespace dyno
