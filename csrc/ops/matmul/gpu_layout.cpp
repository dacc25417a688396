#include "ops/matmul/gpu_layout.h"

#include <algorithm>

#include "core/error.h"
#include "ops/matmul/gpu_pack.h"

namespace dyno::ops {

namespace {

// Calls f<type>() for a type that has the layout.
template <typename F>
void with_gpu_type(DType type, F&& f) {
  switch (type) {
#define DYNO_CASE(t) \
  case DType::t:     \
    return f.template operator()<DType::t>();
    DYNO_CASE(f16)
    DYNO_CASE(bf16)
    DYNO_CASE(q4_0)
    DYNO_CASE(q4_1)
    DYNO_CASE(q5_0)
    DYNO_CASE(q5_1)
    DYNO_CASE(q8_0)
    DYNO_CASE(q2_k)
    DYNO_CASE(q3_k)
    DYNO_CASE(q4_k)
    DYNO_CASE(q5_k)
    DYNO_CASE(q6_k)
    DYNO_CASE(iq4_nl)
    DYNO_CASE(iq4_xs)
    DYNO_CASE(mxfp4)
#undef DYNO_CASE
    default:
      throw UnsupportedError(str_cat("[gpu layout] type ", dtype_name(type), " has no layout for the GPU"));
  }
}

void check_k(DType type, int64_t k) {
  DYNO_CHECK(UnsupportedError, k > 0 && k % dtype_info(type).block_elements == 0, "[gpu layout] k=", k,
             " is no multiple of the ", dtype_info(type).block_elements, " elements of a ", dtype_name(type), " block");
}

uint32_t load_u32(const std::byte* at) {
  uint32_t word;
  std::memcpy(&word, at, 4);
  return word;
}
uint32_t byte_at(const std::byte* at, int64_t i) { return static_cast<uint32_t>(at[i]); }
float half_at(const std::byte* at, int64_t i) {
  return f16_to_f32(static_cast<uint16_t>(byte_at(at, 2 * i) | byte_at(at, 2 * i + 1) << 8));
}

// Where the element (row, k) of a tile stands: the inverse of gpu_pair_row and gpu_pair_k.
struct Slot {
  int lane, s, j, e;
};
Slot slot_of(int row, int k) { return {row % 8 * 4 + k % 8 / 2, k / 16, row / 8 + 2 * (k % 16 / 8), k % 2}; }

template <DType kType>
uint32_t read_code(const std::byte* codes, const Slot& at) {
  constexpr GpuFormat f = gpu_format(kType);
  if constexpr (f.low_bits == 16) {
    return load_u32(codes + at.s * 512 + at.lane * 16 + at.j * 4) >> (16 * at.e) & 0xffffu;
  } else if constexpr (f.low_bits == 8) {
    return byte_at(codes, at.s / 2 * 512 + at.lane * 16 + at.s % 2 * 8 + at.j * 2 + at.e);
  } else {
    const auto plane = [&](const std::byte* base, int bits, bool codebook_order) {
      const int pairs = 16 / bits, index = 4 * at.s + at.j, p = index % pairs;
      const uint32_t word = load_u32(base + (at.lane * bits + index / pairs) * 4);
      return word >> (codebook_order ? 8 * p + 4 * at.e : bits * p + 16 * at.e) & ((1u << bits) - 1u);
    };
    uint32_t code = plane(codes, f.low_bits, f.codebook == GpuCodebook::iq4nl);
    if constexpr (f.high_bits != 0) {
      code |= plane(codes + kGpuRows * kGpuTile * f.low_bits / 8, f.high_bits, false) << f.low_bits;
    }
    return code;
  }
}

template <DType kType>
float read_value(const std::byte* unit, int row, int k) {
  constexpr GpuFormat f = gpu_format(kType);
  constexpr int kTiles = f.super_block() ? 4 : 1;
  const int tile = k / kGpuTile, in_tile = k % kGpuTile, g = row % 8, half = row / 8;
  const uint32_t code = read_code<kType>(unit + tile * f.tile_bytes(), slot_of(row, in_tile));
  if constexpr (kType == DType::f16) return f16_to_f32(static_cast<uint16_t>(code));
  if constexpr (kType == DType::bf16) return bf16_to_f32(static_cast<uint16_t>(code));
  const std::byte* scales = unit + tile * f.tile_bytes() + f.code_bytes();
  const std::byte* super = unit + kTiles * f.tile_bytes();
  const float q = codebook_value<kType>(code);
  if constexpr (f.scale == GpuScale::d) {
    return half_at(scales, 4 * g + 2 * half + in_tile / 32) * q;
  } else if constexpr (f.scale == GpuScale::d_m) {
    const int64_t at = 8 * g + 4 * half + 2 * (in_tile / 32);
    return half_at(scales, at) * q + half_at(scales, at + 1);
  } else if constexpr (f.scale == GpuScale::e8m0) {
    return e8m0_half_to_f32(static_cast<uint8_t>(byte_at(scales, 4 * g + 2 * (in_tile / 32) + half))) * q;
  } else if constexpr (f.scale == GpuScale::k_min32) {
    const int64_t at = 8 * g + 4 * (in_tile / 32) + half;
    return half_at(super, 4 * g + half) * static_cast<float>(byte_at(scales, at)) * q -
           half_at(super, 4 * g + 2 + half) * static_cast<float>(byte_at(scales, at + 2));
  } else if constexpr (f.scale == GpuScale::k_min16) {
    const uint32_t both = byte_at(scales, 8 * g + 2 * (in_tile / 16) + half);
    return half_at(super, 4 * g + half) * static_cast<float>(both & 15) * q -
           half_at(super, 4 * g + 2 + half) * static_cast<float>(both >> 4);
  } else if constexpr (f.scale == GpuScale::k_scale16) {
    const int scale = static_cast<int>(byte_at(scales, 8 * g + 2 * (in_tile / 16) + half)) - 128;
    return half_at(super, 2 * g + half) * static_cast<float>(scale) * q;
  } else if constexpr (f.scale == GpuScale::k_scale32) {
    const int scale = static_cast<int>(byte_at(scales, 4 * g + 2 * (in_tile / 32) + half)) - 128;
    return half_at(super, 2 * g + half) * static_cast<float>(scale) * q;
  } else {
    return q;
  }
}

}  // namespace

void repack_gpu(DType type, int64_t n, int64_t k, const std::byte* plain, std::byte* out, int64_t first, int64_t last) {
  check_k(type, k);
  with_gpu_type(type, [&]<DType kType>() {
    constexpr GpuFormat f = gpu_format(kType);
    const FileRows<kType> rows{reinterpret_cast<const uint8_t*>(plain), n, k};
    const int64_t units = (k + f.unit_k() - 1) / f.unit_k();
    for (int64_t stripe = first; stripe < last; ++stripe) {
      for (int64_t unit = 0; unit < units; ++unit) {
        std::byte* at = out + (stripe * units + unit) * f.unit_bytes();
        for (int word = 0; word < f.unit_bytes() / 4; ++word) {
          const uint32_t value = pack_word<kType>(rows, stripe * kGpuRows, unit * f.unit_k(), word);
          std::memcpy(at + 4 * word, &value, 4);
        }
      }
    }
  });
}

void dequantize_gpu_row(DType type, int64_t k, const std::byte* packed, int64_t row, float* out) {
  check_k(type, k);
  with_gpu_type(type, [&]<DType kType>() {
    constexpr GpuFormat f = gpu_format(kType);
    const std::byte* stripe = packed + row / kGpuRows * gpu_stripe_bytes(kType, k);
    for (int64_t i = 0; i < k; ++i) {
      out[i] = read_value<kType>(stripe + i / f.unit_k() * f.unit_bytes(), static_cast<int>(row % kGpuRows),
                                 static_cast<int>(i % f.unit_k()));
    }
  });
}

}  // namespace dyno::ops
