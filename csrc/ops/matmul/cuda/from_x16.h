// Repacks layout x16 to Layout::gpu after copies of CPU weights. Plain host code.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "ops/cuda_stream.h"

namespace dyno::ops::cuda {

// Matrices of one launch: matrix i at `x16` becomes matrix place[i] at `out`.
struct X16Matrices {
  static constexpr int kMost = 256;
  const uint8_t* x16 = nullptr;
  uint8_t* out = nullptr;
  int32_t n = 0, k = 0;
  int32_t count = 0;  // at most kMost
  uint16_t place[kMost] = {};
};

// Writes the same bytes as repack_gpu_from_x16(). `x16` and `out` must be aligned to 16 bytes. Throws UnsupportedError
// for a type without both layouts.
void repack_from_x16(DType type, const X16Matrices& matrices, CUstream_st* stream);

}  // namespace dyno::ops::cuda
