// Reads and writes single values of the float types and of q8_0 blocks (34 bytes: f16 scale, 32 codes).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace dyno::device {

enum class Scalar : int { f32, f16, bf16, q8_0 };

// `index`: element of the row that starts at `row`; blocks are 2-byte aligned.
template <Scalar kType>
__device__ __forceinline__ float load_scalar(const uint8_t* row, int64_t index) {
  if constexpr (kType == Scalar::f32) {
    return reinterpret_cast<const float*>(row)[index];
  } else if constexpr (kType == Scalar::f16) {
    return __half2float(reinterpret_cast<const __half*>(row)[index]);
  } else if constexpr (kType == Scalar::bf16) {
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[index]);
  } else {
    const uint8_t* block = row + index / 32 * 34;
    const float scale = __half2float(*reinterpret_cast<const __half*>(block));
    return scale * static_cast<float>(reinterpret_cast<const int8_t*>(block)[2 + index % 32]);
  }
}

}  // namespace dyno::device
