// Reads single elements of Layout::gpu as float32, on the host and on the device. gpu_layout.h describes the layout.
#pragma once

#include "ops/matmul/gpu_pack.h"

namespace dyno::ops {

DYNO_HOST_DEVICE inline uint32_t gpu_u32(const uint8_t* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return word;
}
DYNO_HOST_DEVICE inline float gpu_f32(const uint8_t* at) {
  float value;
  std::memcpy(&value, at, 4);
  return value;
}
DYNO_HOST_DEVICE inline float gpu_half(const uint8_t* at, int64_t i) {
  return f16_to_f32(static_cast<uint16_t>(at[2 * i] | at[2 * i + 1] << 8));
}

// The position of element (row, k) in a tile: the inverse of gpu_pair_row and gpu_pair_k.
struct GpuSlot {
  int lane, s, j, e;
};
DYNO_HOST_DEVICE constexpr GpuSlot gpu_slot(int row, int k) {
  return {row % 8 * 4 + k % 8 / 2, k / 16, row / 8 + 2 * (k % 16 / 8), k % 2};
}

template <DType kType>
DYNO_HOST_DEVICE inline uint32_t gpu_code(const uint8_t* codes, const GpuSlot& at) {
  constexpr GpuFormat f = gpu_format(kType);
  if constexpr (f.low_bits == 16) {
    return gpu_u32(codes + at.s * 512 + at.lane * 16 + at.j * 4) >> (16 * at.e) & 0xffffu;
  } else if constexpr (f.low_bits == 8) {
    return codes[at.s / 2 * 512 + at.lane * 16 + at.s % 2 * 8 + at.j * 2 + at.e];
  } else {
    const auto plane = [&](const uint8_t* base, int bits, bool codebook_order) {
      const int pairs = 16 / bits, index = 4 * at.s + at.j, p = index % pairs;
      const uint32_t word = gpu_u32(base + (at.lane * bits + index / pairs) * 4);
      return word >> (codebook_order ? gpu_codebook_bit(at.j, at.e) : bits * p + 16 * at.e) & ((1u << bits) - 1u);
    };
    uint32_t code = plane(codes, f.low_bits, f.lookup());
    if constexpr (f.high_bits != 0) {
      code |= plane(codes + kGpuRows * kGpuTile * f.low_bits / 8, f.high_bits, false) << f.low_bits;
    }
    return code;
  }
}

template <DType kType>
DYNO_HOST_DEVICE inline float gpu_value(const uint8_t* unit, int row, int k) {
  constexpr GpuFormat f = gpu_format(kType);
  constexpr int kTiles = f.super_block() ? 4 : 1;
  const int tile = k / kGpuTile, in_tile = k % kGpuTile, g = row % 8, half = row / 8;
  const uint32_t code = gpu_code<kType>(unit + tile * f.tile_bytes(), gpu_slot(row, in_tile));
  if constexpr (kType == DType::f16) return f16_to_f32(static_cast<uint16_t>(code));
  if constexpr (kType == DType::bf16) return bf16_to_f32(static_cast<uint16_t>(code));
  const uint8_t* scales = unit + tile * f.tile_bytes() + f.code_bytes();
  const uint8_t* super = unit + kTiles * f.tile_bytes();
  const float q = codebook_value<kType>(code);
  if constexpr (f.scale == GpuScale::d) {
    return gpu_half(scales, 4 * g + 2 * half + in_tile / 32) * q;
  } else if constexpr (f.scale == GpuScale::d_m) {
    const int64_t at = 8 * g + 4 * half + 2 * (in_tile / 32);
    return gpu_half(scales, at) * q + gpu_half(scales, at + 1);
  } else if constexpr (f.scale == GpuScale::d_scale16) {
    const uint8_t* of_rows = scales + 16 * g;
    const int scale = static_cast<int>(of_rows[8 + 2 * (in_tile / 16) + half]) - 128;
    return gpu_f32(of_rows + 4 * half) * static_cast<float>(scale) * q;
  } else if constexpr (f.scale == GpuScale::e8m0) {
    return e8m0_half_to_f32(static_cast<uint8_t>(scales[4 * g + 2 * (in_tile / 32) + half])) * q;
  } else if constexpr (f.scale == GpuScale::k_min32) {
    const int64_t at = 8 * g + 4 * (in_tile / 32) + half;
    return gpu_half(super, 4 * g + half) * static_cast<float>(scales[at]) * q -
           gpu_half(super, 4 * g + 2 + half) * static_cast<float>(scales[at + 2]);
  } else if constexpr (f.scale == GpuScale::k_min16) {
    const uint32_t both = scales[8 * g + 2 * (in_tile / 16) + half];
    return gpu_half(super, 4 * g + half) * static_cast<float>(both & 15) * q -
           gpu_half(super, 4 * g + 2 + half) * static_cast<float>(both >> 4);
  } else if constexpr (f.scale == GpuScale::k_scale16) {
    const int scale = static_cast<int>(scales[8 * g + 2 * (in_tile / 16) + half]) - 128;
    return gpu_half(super, 2 * g + half) * static_cast<float>(scale) * q;
  } else if constexpr (f.scale == GpuScale::f_table16) {
    const uint8_t* table = super + f.super_row_bytes();
    const int byte = scales[8 * g + 2 * (in_tile / 16) + half], shift = static_cast<int8_t>(table[17]);
    const float s = gpu_f32(super + 8 * g + 4 * half) * static_cast<float>((byte & 254) - table[16]);
    return s * static_cast<float>(static_cast<int>(table[code]) - 128 + (byte & 1) * shift);
  } else if constexpr (f.scale == GpuScale::k_scale32) {
    const int scale = static_cast<int>(scales[4 * g + 2 * (in_tile / 32) + half]) - 128;
    return gpu_half(super, 2 * g + half) * static_cast<float>(scale) * q;
  } else {
    return q;
  }
}

}  // namespace dyno::ops
