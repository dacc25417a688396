// Selects the instances of flash.cuh for one head size from run-time shapes.
#pragma once

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "ops/attention/flash.cuh"
#include "ops/attention/flash_grid.h"
#include "ops/attention/kernels_cuda.h"

namespace dyno::ops {

template <int kHead, bool kBf16, int kRowWarps, int kKeyWarps, int kKeys>
void launch_flash_instance(const FlashTask& task, const FlashGrid& grid, CUstream_st* stream) {
  using Shape = Flash<kHead, kBf16, kRowWarps, kKeyWarps, kKeys>;
  static_assert(Shape::shared_bytes() <= flash_shared_bytes(kHead, kRowWarps, kKeyWarps, kKeys));
  const auto kernel = flash_kernel<kHead, kBf16, kRowWarps, kKeyWarps, kKeys>;
  constexpr auto kShared = static_cast<int>(Shape::shared_bytes());
  // A property of the function on the current device; setting it again costs almost nothing.
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  launch_dependent("attention", kernel, dim3(grid.tiles, grid.kv_heads, grid.splits), Shape::kThreads, kShared, stream,
                   task);
}

template <int kHead, bool kBf16>
void launch_flash_type(const FlashTask& task, FlashShape shape, const FlashGrid& grid, CUstream_st* stream) {
  constexpr int kKeys = flash_keys(kHead);
  switch (shape) {
    case FlashShape::rows16:
      return launch_flash_instance<kHead, kBf16, 1, flash_key_warps(kHead), 32>(task, grid, stream);
    case FlashShape::rows64:
      return launch_flash_instance<kHead, kBf16, 4, 1, kKeys>(task, grid, stream);
    case FlashShape::rows128:
      if constexpr (kHead <= 128) return launch_flash_instance<kHead, kBf16, 8, 1, kKeys>(task, grid, stream);
  }
}

template <int kHead>
void launch_flash(const FlashTask& task, FlashShape shape, bool bf16, const FlashGrid& grid, CUstream_st* stream) {
  return bf16 ? launch_flash_type<kHead, true>(task, shape, grid, stream)
              : launch_flash_type<kHead, false>(task, shape, grid, stream);
}

}  // namespace dyno::ops
