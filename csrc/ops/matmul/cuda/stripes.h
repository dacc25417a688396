// The division of the rows of w among the blocks of `stream`. Plain host code.
#pragma once

#include <cstdint>

#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

// Of `stripes` of a block: three for each two blocks, see stream_trio.cuh.
inline constexpr int kTrio = 3;

// The blocks for `n` rows of w, with so many stripes each.
constexpr int64_t stream_blocks(int64_t n, int stripes) {
  const int64_t all = (n + kGpuRows - 1) / kGpuRows;
  return stripes == kTrio ? all / 3 * 2 + all % 3 : (all + stripes - 1) / stripes;
}

}  // namespace dyno::ops::cuda
