// Rows of the latent cache, for the kernels of mla_expand.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "device/convert.cuh"

namespace dyno::ops {

inline device::Scalar latent_scalar(DType type) {
  switch (type) {
    case DType::f32:
      return device::Scalar::f32;
    case DType::bf16:
      return device::Scalar::bf16;
    case DType::q8_0:
      return device::Scalar::q8_0;
    default:
      return device::Scalar::f16;
  }
}

// Number `at` of a row.
__device__ __forceinline__ float load_latent(device::Scalar type, const uint8_t* row, int at) {
  switch (type) {
    case device::Scalar::f32:
      return device::load_scalar<device::Scalar::f32>(row, at);
    case device::Scalar::bf16:
      return device::load_scalar<device::Scalar::bf16>(row, at);
    case device::Scalar::q8_0:
      return device::load_scalar<device::Scalar::q8_0>(row, at);
    default:
      return device::load_scalar<device::Scalar::f16>(row, at);
  }
}

inline bool on_16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace dyno::ops
