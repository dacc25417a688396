// The launch of flash attention for heads of 257 to 512 dimensions.
#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "ops/attention/flash_grid.h"
#include "ops/attention/flash_wide.cuh"

namespace dyno::ops {

void flash_wgmma_512(const FlashTask& task, int /*rows*/, bool bf16, const FlashGrid& grid, CUstream_st* stream) {
  static_assert(FlashWide::kSharedBytes <= kFlashWgmmaShared);
  const auto kernel = bf16 ? flash_wide_kernel<true> : flash_wide_kernel<false>;
  constexpr auto kShared = static_cast<int>(FlashWide::kSharedBytes);
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  // The same tiles of all heads come before the next, shorter tiles.
  launch_dependent("attention", kernel, dim3(grid.kv_heads, grid.tiles, grid.splits), FlashWide::kThreads, kShared,
                   stream, task);
  launch_flash_combine(task, grid, FlashWide::kRows, flash_split_step(FlashWide::kKeys), stream);
}

}  // namespace dyno::ops
