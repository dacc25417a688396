// The launch of flash_wgmma_pairs.cuh for one head size.
#pragma once

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "ops/attention/flash_grid.h"
#include "ops/attention/flash_wgmma_pairs.cuh"

namespace dyno::ops {

template <int kHead>
void launch_flash_wgmma_pairs(const FlashTask& task, const FlashGrid& grid, CUstream_st* stream) {
  using Shape = FlashWgmmaPairs<kHead>;
  static_assert(Shape::kSharedBytes <= kFlashWgmmaShared);
  const auto kernel = flash_wgmma_pairs_kernel<kHead>;
  constexpr auto kShared = static_cast<int>(Shape::kSharedBytes);
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  // The same tiles of all heads come before the next, shorter tiles.
  launch_dependent("attention", kernel, dim3(grid.kv_heads, grid.tiles, grid.splits), Shape::kThreads, kShared, stream,
                   task);
  launch_flash_combine(task, grid, Shape::kRows, Shape::kKeys, stream);
}

}  // namespace dyno::ops
