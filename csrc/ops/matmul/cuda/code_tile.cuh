// Tensor core operands that are integers: codes times the small scales within a super-block. The factors of the
// super-block are applied to the float32 sums, one product per 256 k. For types with a minimum, its contribution is a
// separate product. So a pair of weights takes a mask and a multiplication, while WeightTile (weight_tile.cuh)
// subtracts, scales and rounds.
#pragma once

#include "ops/matmul/cuda/weight_tile.cuh"

namespace dyno::ops::cuda {

// Rows g of an operand times `unit_low()`, and rows g + 8 times `unit_high()`, are codes times small scales.
template <DType kType>
struct CodeTile : WeightTile<kType> {
  using Base = WeightTile<kType>;
  using Base::high;
  using Base::kFormat;
  using Base::low;
  using Base::scale;
  static constexpr bool kMin = kFormat.scale == GpuScale::k_min32;

  // A code in the lowest bits of an f16 is exactly code·2^-24; the code of a row g + 8 is four bits higher.
  static constexpr float unit_low() { return kMin ? 0x1p24f : 1.0f; }
  static constexpr float unit_high() { return kMin ? 0x1p20f : 1.0f; }

  // Pair kPair of step kStep in the 16-bit halves of a word: rows g in the lowest bits, rows g + 8 four bits higher.
  template <int kStep, int kPair>
  __device__ __forceinline__ uint32_t codes() const {
    constexpr int kUp = 4 * (kPair % 2);
    constexpr uint32_t kMask = 0x000f000fu << kUp;
    const uint32_t word = kPair < 2 ? low[kStep] : low[kStep] >> 8;
    uint32_t code = kMin ? word & kMask : and_or(word, kMask, 0x64006400u);
    if constexpr (kFormat.high_bits != 0) {
      constexpr int kAt = kFormat.high_bits == 1 ? 4 * kStep + kPair : 2 * (4 * (kStep % 2) + kPair);
      constexpr int kShift = kAt - 4 - kUp;
      const uint32_t bits = high[kFormat.high_bits == 1 ? 0 : kStep / 2];
      const uint32_t moved = kShift >= 0 ? bits >> (kShift & 31) : bits << (-kShift & 31);
      code = and_or(moved, ((1u << kFormat.high_bits) - 1u) * 0x10001u << (4 + kUp), code);
    }
    return code;
  }

  // The high byte of 1024 as an f16, four times, in a register of each lane. If the compiler knew the value, each
  // permutation would have it as its constant and load the selector to a register. `rows`: of w in a block.
  static __device__ __forceinline__ uint32_t magic(int rows, int lane) {
    return 0x64646464u ^ static_cast<uint32_t>(32 * rows + lane) >> 16;
  }

  // For rows g and g + 8; signed scales of rows g + 8 are divided by 16. `high_bytes`: of magic().
  template <int kStep>
  __device__ __forceinline__ __half2 small_scales(uint32_t high_bytes) const {
    constexpr int kAt = kMin ? 0 : kStep % 2 * 2;
    constexpr uint32_t kSelect = kAt | 4 << 4 | (kAt + 1) << 8 | 4 << 12;
    const __half2 biased = as_half2(__byte_perm(scale[kStep / 2], high_bytes, kSelect));
    if constexpr (kMin) {
      return __hsub2(biased, as_half2(0x64006400u));
    } else {  // 1152 + scale
      return __hfma2(biased, as_half2(0x2c003c00u), as_half2(0xd480e480u));
    }
  }

  template <int kStep, int kPair>
  __device__ __forceinline__ uint32_t product(__half2 factor) const {
    __half2 code = as_half2(codes<kStep, kPair>());
    if constexpr (!kMin) {
      constexpr uint32_t kOffset = 0x6400u + (static_cast<uint32_t>(kFormat.offset) << 4 * (kPair % 2));
      code = __hsub2(code, as_half2(kOffset * 0x10001u));
    }
    return as_bits(__hmul2(code, factor));
  }

  // The A operand of step kStep.
  template <int kStep>
  __device__ __forceinline__ void code_fragment(uint32_t (&a)[4], uint32_t high_bytes) const {
    const __half2 s = small_scales<kStep>(high_bytes);
    a[0] = product<kStep, 0>(low2(s));
    a[1] = product<kStep, 1>(high2(s));
    a[2] = product<kStep, 2>(low2(s));
    a[3] = product<kStep, 3>(high2(s));
  }
};

// Factors of the super-block `unit` in shared memory, for rows g and g + 8.
template <DType kType>
__device__ __forceinline__ __half2 code_factors(const uint8_t* unit, int lane) {
  constexpr GpuFormat kFormat = gpu_format(kType);
  return as_half2(
      *reinterpret_cast<const uint32_t*>(unit + 4 * kFormat.tile_bytes() + (lane >> 2) * (kFormat.super_bytes() / 8)));
}

// The A operand for the sums of x: the negated minima of eight blocks, twice.
template <DType kType>
__device__ __forceinline__ void code_minima(const uint8_t* unit, int lane, uint32_t (&a)[4]) {
  constexpr GpuFormat kFormat = gpu_format(kType);
  const __half2 factors = as_half2(*reinterpret_cast<const uint32_t*>(unit + 4 * kFormat.tile_bytes() +
                                                                      (lane >> 2) * (kFormat.super_bytes() / 8) + 4));
  // Lane t has blocks 2t and 2t + 1, the ones of tile t.
  const uint2 of_tile = *reinterpret_cast<const uint2*>(unit + (lane & 3) * kFormat.tile_bytes() +
                                                        kFormat.code_bytes() + (lane >> 2) * 8);
  const __half2 magic = as_half2(0x64006400u);
  const uint32_t rows_g = __byte_perm(of_tile.x, of_tile.y, 0x0602);
  const uint32_t rows_g8 = __byte_perm(of_tile.x, of_tile.y, 0x0703);
  const __half2 minus = __hneg2(factors);
  a[0] = as_bits(__hmul2(__hsub2(as_half2(and_or(rows_g, 0x00ff00ffu, 0x64006400u)), magic), low2(minus)));
  a[1] = as_bits(__hmul2(__hsub2(as_half2(and_or(rows_g8, 0x00ff00ffu, 0x64006400u)), magic), high2(minus)));
  a[2] = a[0], a[3] = a[1];
}

}  // namespace dyno::ops::cuda
