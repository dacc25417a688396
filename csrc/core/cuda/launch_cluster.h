// launch_dependent() for kernels whose blocks work in clusters (device/cluster_shared.cuh).
#pragma once

#include "core/cuda/launch.h"

namespace dyno {

// `cluster` blocks along z are one cluster; the grid's z is a multiple of it.
template <typename... Params, typename... Args>
void launch_dependent_cluster(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, unsigned cluster,
                              size_t shared_bytes, cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = cluster;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = has_dependent_launch() ? 2 : 1;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op, __FILE__, __LINE__);
}

}  // namespace dyno
