// Selects the instances of direct.cuh for one head size from run-time types and rows.
#pragma once

#include "core/cuda/launch.h"
#include "ops/attention/direct.cuh"

namespace dyno::ops::direct {

template <int kHead, bool kFused, Scalar kKey, Scalar kValue = kKey>
void launch_types(const DirectTask& task, int rows, const dim3& grid, CUstream_st* stream) {
  constexpr int kCaches = (kKey == Scalar::q8_0) + (kValue == Scalar::q8_0);  // that may be staged
  const auto start = [&]<int kTiles, bool kStaged>() {
    const auto kernel = direct_kernel<kHead, kKey, kValue, kTiles, kFused, kStaged>;
    static_assert(sizeof(FreshMemory<kHead, 8 * kTiles>) <= direct_fresh_bytes(kHead, 8 * kTiles));
    const size_t shared =
        direct_shared_bytes(kHead, rows, kStaged ? kCaches : 0) + (kFused ? direct_fresh_bytes(kHead, rows) : 0);
    DYNO_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    const char* op = kFused ? "rope_attention" : "attention";
    launch_dependent(op, kernel, grid, 32 * kWarps, shared, stream, task);
    if (task.common.splits == 1) return;
    add_parts<8 * kTiles, BlockParts<direct_block_tiles(kHead)>>(op, task.common, grid.x, stream);
  };
  const auto start_tiles = [&]<int kTiles>() {
    if constexpr (kCaches > 0) {
      if (task.staged) return start.template operator()<kTiles, true>();
    }
    start.template operator()<kTiles, false>();
  };
  if constexpr (kHead <= 128 && kKey == kValue) {
    if (rows == 16) return start_tiles.template operator()<2>();
  }
  start_tiles.template operator()<1>();
}

template <int kHead, bool kFused>
void launch(const DirectTask& task, Scalar keys, Scalar values, int rows, const dim3& grid, CUstream_st* stream) {
  if constexpr (!kFused && kHead <= kDirectMaxMixedHead) {
    if (keys != values) {
      return keys == Scalar::q8_0 ? launch_types<kHead, false, Scalar::q8_0, Scalar::f16>(task, rows, grid, stream)
                                  : launch_types<kHead, false, Scalar::f16, Scalar::q8_0>(task, rows, grid, stream);
    }
  }
  switch (keys) {
    case Scalar::bf16:
      return launch_types<kHead, kFused, Scalar::bf16>(task, rows, grid, stream);
    case Scalar::q8_0:
      return launch_types<kHead, kFused, Scalar::q8_0>(task, rows, grid, stream);
    default:
      return launch_types<kHead, kFused, Scalar::f16>(task, rows, grid, stream);
  }
}

}  // namespace dyno::ops::direct
