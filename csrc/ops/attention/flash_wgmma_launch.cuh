// Selects the instances of flash_wgmma.cuh for one head size from run-time shapes.
#pragma once

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "ops/attention/flash_launch.cuh"
#include "ops/attention/flash_wgmma.cuh"

namespace dyno::ops {

template <int kHead, bool kBf16, int kRowGroups>
void launch_flash_wgmma_instance(const FlashTask& task, const FlashGrid& grid, CUstream_st* stream) {
  using Shape = FlashWgmma<kHead, flash_value_head(kHead), kRowGroups>;
  static_assert(Shape::kSharedBytes <= kFlashWgmmaShared);
  const auto kernel = flash_wgmma_kernel<kHead, flash_value_head(kHead), kBf16, kRowGroups>;
  constexpr auto kShared = static_cast<int>(Shape::kSharedBytes);
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  // The same tiles of all heads come before the next, shorter tiles.
  launch_dependent("attention", kernel, dim3(grid.kv_heads, grid.tiles, grid.splits), Shape::kThreads, kShared, stream,
                   task);
  launch_flash_combine(task, grid, Shape::kRows, flash_split_step(Shape::kKeys), stream);
}

template <int kHead>
void launch_flash_wgmma(const FlashTask& task, int rows, bool bf16, const FlashGrid& grid, CUstream_st* stream) {
  if (rows == 128) {
    return bf16 ? launch_flash_wgmma_instance<kHead, true, 2>(task, grid, stream)
                : launch_flash_wgmma_instance<kHead, false, 2>(task, grid, stream);
  }
  return bf16 ? launch_flash_wgmma_instance<kHead, true, 1>(task, grid, stream)
              : launch_flash_wgmma_instance<kHead, false, 1>(task, grid, stream);
}

}  // namespace dyno::ops
