// Writes single values of the float types and of q8_0 blocks (34 bytes: f16 scale, 32 codes).
#pragma once

#include "device/convert.cuh"
#include "device/reduce.cuh"

namespace dyno::device {

// Writes a warp's 32 values as one block. A block with a non-finite value gets a NaN scale, so that the error stays
// visible (as on the CPU).
__device__ __forceinline__ void store_q8_0(float v, uint8_t* block, int lane) {
  const float largest = warp_max(fabsf(v));
  const bool finite = __all_sync(kFullMask, isfinite(v));
  const float scale = finite ? largest / 127.0f : __int_as_float(0x7fffffff);
  const float inverse = finite && largest > 0.0f ? 127.0f / largest : 0.0f;
  reinterpret_cast<int8_t*>(block)[2 + lane] = finite ? static_cast<int8_t>(__float2int_rn(v * inverse)) : int8_t{0};
  if (lane == 0) *reinterpret_cast<__half*>(block) = __float2half_rn(scale);
}

// Writes element `i` of the row that starts at `row`. For q8_0, all lanes of a warp must call it with i = 32·b + lane.
__device__ __forceinline__ void store_scalar(Scalar type, float v, uint8_t* row, int64_t i, int lane) {
  switch (type) {
    case Scalar::f32:
      reinterpret_cast<float*>(row)[i] = v;
      break;
    case Scalar::f16:
      reinterpret_cast<__half*>(row)[i] = __float2half_rn(v);
      break;
    case Scalar::bf16:
      reinterpret_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(v);
      break;
    case Scalar::q8_0:
      store_q8_0(v, row + i / 32 * 34, lane);
      break;
  }
}

}  // namespace dyno::device
