// The elements of a cache row as the products of direct attention read them (direct.cuh).
#pragma once

#include <cuda_runtime.h>

#include "device/convert.cuh"
#include "device/flash.cuh"

namespace dyno::ops::direct {

using device::load_16;
using device::Scalar;

// The rows that a load takes from a tile of keys: all rows, or only rows before or from the run's position on.
enum class Rows { all, settled, fresh };

// Four signed bytes as f16.
__device__ __forceinline__ uint2 code_halves(uint32_t codes) {
  const uint32_t biased = codes ^ 0x80808080u;
  const __half2 offset = device::as_half2(0x64806480u);  // 1024 + 128
  const uint32_t low = __byte_perm(biased, 0x64646464u, 0x4140), high = __byte_perm(biased, 0x64646464u, 0x4342);
  return {device::as_bits(__hsub2(device::as_half2(low), offset)),
          device::as_bits(__hsub2(device::as_half2(high), offset))};
}

// Eight adjacent elements of a row in the form of the cache.
template <Scalar kType>
struct Piece {
  uint4 v;
  // `width`: of the head, a multiple of four; zeros from there on.
  __device__ void load(const uint8_t* row, int dim, int width, bool valid, bool aligned) {
    v = {0, 0, 0, 0};
    if (!valid || dim >= width) return;
    if (aligned || dim + 8 <= width) {
      v = load_16(row + dim * 2, aligned);
    } else {
      const auto* h = reinterpret_cast<const uint16_t*>(row) + dim;
      v.x = h[0] | static_cast<uint32_t>(h[1]) << 16, v.y = h[2] | static_cast<uint32_t>(h[3]) << 16;
    }
  }
  __device__ void load_shared(const uint8_t* row, int dim) { v = *reinterpret_cast<const uint4*>(row + dim * 2); }
  __device__ uint4 unscaled() const { return v; }
  __device__ uint4 values() const { return v; }
  __device__ float scale() const { return 1.0f; }
};
template <>
struct Piece<Scalar::q8_0> {
  uint2 codes;
  uint16_t d;
  __device__ void load(const uint8_t* row, int dim, int width, bool valid, bool) {
    codes = {0, 0}, d = 0;
    if (!valid || dim >= width) return;
    const auto* block = reinterpret_cast<const uint16_t*>(row + dim / 32 * 34);
    const uint16_t* at = block + 1 + dim % 32 / 2;
    d = block[0];
    codes = {at[0] | static_cast<uint32_t>(at[1]) << 16, at[2] | static_cast<uint32_t>(at[3]) << 16};
  }
  __device__ void load_shared(const uint8_t* row, int dim) { load(row, dim, dim + 8, true, false); }
  __device__ uint4 unscaled() const {
    const uint2 a = code_halves(codes.x), b = code_halves(codes.y);
    return {a.x, a.y, b.x, b.y};
  }
  __device__ uint4 values() const {
    const __half2 factor = __half2half2(__ushort_as_half(d));
    const uint4 u = unscaled();
    const auto times = [&](uint32_t h) { return device::as_bits(__hmul2(device::as_half2(h), factor)); };
    return {times(u.x), times(u.y), times(u.z), times(u.w)};
  }
  __device__ float scale() const { return __half2float(__ushort_as_half(d)); }
};

// Four dimensions of a q8_0 row in each of two adjacent blocks.
struct BlockPair {
  uint2 codes;
  uint16_t d[2];
  __device__ uint4 values() const {
    const uint2 a = code_halves(codes.x), b = code_halves(codes.y);
    const auto times = [&](uint32_t h, int block) {
      return device::as_bits(__hmul2(device::as_half2(h), __half2half2(__ushort_as_half(d[block]))));
    };
    return {times(a.x, 0), times(a.y, 0), times(b.x, 1), times(b.y, 1)};
  }
};

template <bool kBf16>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBf16) {
    device::mma_bf16(c, a, b0, b1);
  } else {
    device::mma_f16(c, a, b0, b1);
  }
}

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

}  // namespace dyno::ops::direct
