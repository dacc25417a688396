// Launches of clusters. A kernel whose blocks exchange data through shared memory cannot run block after block, so a
// test must not launch one.
#pragma once

#include <stdexcept>
#include <string>

#include "core/cuda/launch.h"

namespace dyno {

struct Cluster {
  unsigned blocks;
  Cluster(unsigned count, bool = false, unsigned = 1) : blocks(count) {}
};

template <typename... Params, typename... Args>
void launch_dependent_cluster(const char* op, void (*)(Params...), dim3, unsigned, Cluster, size_t, CUstream_st*,
                              const Args&...) {
  throw std::runtime_error(std::string(op) + ": clusters are not emulated");
}

}  // namespace dyno
