// The instructions of csrc/device/flash.cuh that attention over latents uses, over emulated threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace dyno::device {

inline uint32_t transpose_8x8(uint32_t v) {
  const uint64_t* const of = emulated::share<uint64_t>(v);
  const unsigned row = emulated::lane() / 4, column = emulated::lane() % 4 * 2;
  uint32_t out = 0;
  for (unsigned e = 0; e < 2; ++e) {
    out |= (static_cast<uint32_t>(of[(column + e) * 4 + row / 2]) >> (16 * (row % 2)) & 0xffffu) << (16 * e);
  }
  return out;
}

inline uint4 load_16(const uint8_t* p, bool aligned) {
  if (aligned && reinterpret_cast<uintptr_t>(p) % 16 != 0) throw std::runtime_error("16 bytes are not aligned");
  uint4 v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_16(c, a, b0, b1, [](uint32_t pair) {
    return float2{__builtin_bit_cast(float, pair << 16), __builtin_bit_cast(float, pair & 0xffff0000u)};
  });
}

template <bool kBf16>
uint32_t pack2(float low, float high) {
  if constexpr (kBf16) return __builtin_bit_cast(uint32_t, __floats2bfloat162_rn(low, high));
  return as_bits(__floats2half2_rn(low, high));
}
template <bool kBf16>
uint32_t pack2_finite(float low, float high) {
  return kBf16 ? pack2<true>(low, high) : pack_half2(low, high);
}

inline float exp2_fast(float x) { return std::exp2(x); }

}  // namespace dyno::device
