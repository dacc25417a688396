// launch_dependent() for kernels whose blocks work in clusters (device/cluster_shared.cuh).
#pragma once

#include "core/cuda/launch.h"

namespace dyno {

// Blocks along z and y that form one cluster. The driver puts as many of them on a multiprocessor as fit, unless
// `spread` is set.
struct Cluster {
  unsigned blocks = 1;
  bool spread = false;
  unsigned along_y = 1;
  Cluster(unsigned count, bool spread_out = false, unsigned count_y = 1)
      : blocks(count), spread(spread_out), along_y(count_y) {}
};

// The grid's z and y must be multiples of the cluster's blocks.
template <typename... Params, typename... Args>
void launch_dependent_cluster(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, Cluster cluster,
                              size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[3]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 1;
  attributes[0].val.clusterDim.y = cluster.along_y;
  attributes[0].val.clusterDim.z = cluster.blocks;
  attributes[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[1].val.clusterSchedulingPolicyPreference =
      cluster.spread ? cudaClusterSchedulingPolicySpread : cudaClusterSchedulingPolicyDefault;
  attributes[2].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[2].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = has_dependent_launch() ? 3 : 2;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op, __FILE__, __LINE__);
}

}  // namespace dyno
