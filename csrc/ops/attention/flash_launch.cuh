// Selects the instances of flash.cuh for one head size from run-time shapes.
#pragma once

#include "core/cuda/check.h"
#include "core/cuda/launch.h"
#include "ops/attention/flash.cuh"
#include "ops/attention/flash_grid.h"
#include "ops/attention/kernels_cuda.h"
#include "ops/instances.h"

namespace dyno::ops {

template <int kHead, bool kBf16, int kRows>
void launch_flash_instance(const FlashTask& task, const FlashGrid& grid, CUstream_st* stream) {
  const auto kernel = flash_kernel<kHead, kBf16, kRows>;
  constexpr auto kShared = static_cast<int>(flash_shared_bytes(kHead, kRows));
  // A property of the function on the current device; setting it again costs almost nothing.
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  launch_dependent("attention", kernel, dim3(grid.tiles, grid.kv_heads), Flash<kHead, kRows>::kThreads, kShared, stream,
                   task);
}

template <int16_t kRows>
inline constexpr bool kFlashCompiled = instance_compiled("flash", kNoTypeBit, {kRows});

template <int kHead, bool kBf16>
void launch_flash_type(const FlashTask& task, int rows, const FlashGrid& grid, CUstream_st* stream) {
  if constexpr (kHead <= 128 && kFlashCompiled<128>) {
    if (rows == 128) return launch_flash_instance<kHead, kBf16, 128>(task, grid, stream);
  }
  if constexpr (kFlashCompiled<64>) {
    if (rows == 64) return launch_flash_instance<kHead, kBf16, 64>(task, grid, stream);
  }
  throw_left_out("flash", kBf16 ? DType::bf16 : DType::f16, {static_cast<int16_t>(rows)});
}

template <int kHead>
void launch_flash(const FlashTask& task, int rows, bool bf16, const FlashGrid& grid, CUstream_st* stream) {
  return bf16 ? launch_flash_type<kHead, true>(task, rows, grid, stream)
              : launch_flash_type<kHead, false>(task, rows, grid, stream);
}

}  // namespace dyno::ops
