// Emulated blocks share no multiprocessor, and a cluster of one block is none.
#pragma once

#include "core/cuda/launch_cluster.h"

namespace dyno {

template <typename... Params, typename... Args>
void launch_dependent_common(const char* op, void (*kernel)(Params...), dim3 grid, unsigned threads, Cluster cluster,
                             size_t shared_bytes, CUstream_st* stream, bool, const Args&... args) {
  if (cluster.blocks == 1) return launch_dependent(op, kernel, grid, threads, shared_bytes, stream, args...);
  launch_dependent_cluster(op, kernel, grid, threads, cluster, shared_bytes, stream, args...);
}

}  // namespace dyno
