// The argument of the flash attention kernels.
#pragma once

#include "ops/attention/tile.cuh"

namespace dyno::ops {

struct FlashTask {
  CudaAttention common;
  int k_type, v_type;  // device::Scalar
  bool aligned;        // rows of the cache start at 16-byte addresses
};

inline constexpr float kLog2E = 1.4426950408889634f;

}  // namespace dyno::ops
