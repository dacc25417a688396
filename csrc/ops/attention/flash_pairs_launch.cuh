// Selects the instances of flash_pairs.cuh for one head size from run-time shapes.
#pragma once

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "ops/attention/flash_grid.h"
#include "ops/attention/flash_pairs.cuh"

namespace dyno::ops {

template <int kHead, int kRowWarps>
void launch_flash_pairs_instance(const FlashTask& task, const FlashGrid& grid, CUstream_st* stream) {
  using Shape = FlashPairs<kHead, kRowWarps>;
  static_assert(Shape::shared_bytes() == flash_pairs_shared_bytes(kHead, Shape::kRows));
  const auto kernel = flash_pairs_kernel<kHead, kRowWarps>;
  constexpr auto kShared = static_cast<int>(Shape::shared_bytes());
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  // The same tiles of all heads come before the next, shorter tiles.
  launch_dependent("attention", kernel, dim3(grid.kv_heads, grid.tiles, grid.splits), Shape::kThreads, kShared, stream,
                   task);
}

template <int kHead>
void launch_flash_pairs(const FlashTask& task, int rows, const FlashGrid& grid, CUstream_st* stream) {
  return rows == 128 ? launch_flash_pairs_instance<kHead, 8>(task, grid, stream)
                     : launch_flash_pairs_instance<kHead, 4>(task, grid, stream);
}

}  // namespace dyno::ops
