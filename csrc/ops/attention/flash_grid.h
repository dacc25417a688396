// The grid of a flash attention launch, and the launch that adds the parts of its keys.
#pragma once

#include "ops/attention/flash_task.cuh"

namespace dyno::ops {

struct FlashGrid {
  unsigned tiles, kv_heads, splits;
};

// Adds the parts that a launch of wgmma kernels with tiles of `rows` wrote with batch_partial_row(). A separate launch
// has a warp for each row on all multiprocessors; the last block of a tile alone took 20 us and more. `step`: of
// split_keys(). Launches nothing if the grid has one part.
void launch_flash_combine(const FlashTask& task, const FlashGrid& grid, int rows, int step, CUstream_st* stream);

}  // namespace dyno::ops
