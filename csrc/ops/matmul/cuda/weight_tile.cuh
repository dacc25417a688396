// A lane's part of one tile of Layout::gpu: loaded unmodified, and converted to f16 A operands of mma.m16n8k16 step by
// step.
//
// Integer codes become f16 by placing them in the mantissa of 1024 (0x6400). So the conversion is an OR and an exact
// subtraction, and only the product with the scale rounds.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "device/ptx.cuh"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

using device::and_or;
using device::as_bits;
using device::as_half2;

// Loads kWords (1, 2 or 4) consecutive 32-bit words, which are aligned as a whole.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t* out, const uint8_t* p) {
  if constexpr (kWords == 4) {
    const uint4 v = device::load_stream_16(p);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else if constexpr (kWords == 2) {
    const uint2 v = device::load_stream_8(p);
    out[0] = v.x, out[1] = v.y;
  } else {
    static_assert(kWords == 1);
    out[0] = device::load_stream_4(p);
  }
}

template <int kCount>
using Count = std::integral_constant<int, kCount>;

// One f16 value twice. Instructions on pairs read an operand in this form, without a permutation.
__device__ __forceinline__ __half2 low2(__half2 v) { return __low2half2(v); }
__device__ __forceinline__ __half2 high2(__half2 v) { return __high2half2(v); }

// 1024 + bytes i and j of `word` as two f16 values.
template <int kLow, int kHigh>
__device__ __forceinline__ __half2 bytes_above(uint32_t word) {
  return as_half2(__byte_perm(word, 0x64646464u, kLow | 4 << 4 | kHigh << 8 | 4 << 12));
}
// Bytes i and j of `word` as two f16 values minus `bias`, exact.
template <int kLow, int kHigh, int kBias>
__device__ __forceinline__ __half2 bytes_to_half2(uint32_t word) {
  constexpr uint32_t kMagic = (0x6400u + kBias) * 0x10001u;
  return __hsub2(bytes_above<kLow, kHigh>(word), as_half2(kMagic));
}

// 2^(e − 127) as f16; 0 below 2^-24, and 2^15 above its range; for mxfp4.
__device__ __forceinline__ uint32_t e8m0_half(uint32_t e) {
  const int exponent = min(static_cast<int>(e) - 127, 15);
  if (exponent >= -14) return static_cast<uint32_t>(exponent + 15) << 10;
  return exponent >= -24 ? 1u << (exponent + 24) : 0u;
}

// Looks up eight 4-bit codes in a table of 16 bytes: out[0] has the codes in the low 16 bits, of a row g, and out[1]
// the codes of row g + 8. Bytes 0 and 2 are neighbours of k, and bytes 1 and 3 the same 8 higher.
__device__ __forceinline__ void table_bytes(const uint32_t (&t)[4], uint32_t codes, uint32_t (&out)[2]) {
  const uint32_t index = codes & 0x77777777u;
  const uint32_t half = and_or(codes >> 1, 0x44444444u, 0x32103210u);
  out[0] = __byte_perm(__byte_perm(t[0], t[1], index), __byte_perm(t[2], t[3], index), half);
  out[1] = __byte_perm(__byte_perm(t[0], t[1], index >> 16), __byte_perm(t[2], t[3], index >> 16), half >> 16);
}
// The same with the codebook of iq4_nl, biased by 128.
__device__ __forceinline__ void iq4nl_bytes(uint32_t codes, uint32_t (&out)[2]) {
  // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113, plus 128, little-endian
  constexpr uint32_t kTable[4] = {0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u};
  table_bytes(kTable, codes, out);
}

// Eight codes of mxfp4 as f16 values times 2^-14, whose top bits they are: the registers of a step of operand A.
__device__ __forceinline__ void mxfp4_halves(uint32_t codes, uint32_t (&a)[4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // The codes of k and, four bits higher, of k + 8, at the top of a half each.
    const uint32_t tops = __byte_perm(codes, 0u, r == 0 ? 0x1404 : 0x3424);
    a[r] = and_or(tops << 4, 0x80008000u, (tops << 1) & 0x0e000e00u);
    a[r + 2] = and_or(tops, 0x80008000u, (tops >> 3) & 0x0e000e00u);
  }
}

template <DType kType>
struct WeightTile {
  static constexpr GpuFormat kFormat = gpu_format(kType);
  static constexpr int kLowWords = kFormat.low_bits == 16 ? 16 : kFormat.low_bits;  // per lane
  static constexpr int kHighWords = kFormat.high_bits;
  static constexpr int kScaleWords = kFormat.scale_bytes() / 32;
  static constexpr int kSuperWords = kFormat.super_row_bytes() / 32;
  static constexpr bool kTable = kFormat.codebook == GpuCodebook::table;

  uint32_t low[kLowWords];
  uint32_t high[kHighWords == 0 ? 1 : kHighWords];
  uint32_t scale[kScaleWords == 0 ? 1 : kScaleWords];
  uint32_t super[kSuperWords == 0 ? 1 : kSuperWords];
  uint32_t table[4], table_more;  // of a format with a table: biased bytes; then bias and shift
  uint32_t zero;                  // floats: see fragment()

  // A lane's position in a stripe, tile after tile.
  struct Cursor {
    const uint8_t* codes;
    const uint8_t* high_codes;
    const uint8_t* scales;
    const uint8_t* super;
    const uint8_t* table;
    int tile;

    __device__ __forceinline__ Cursor(const uint8_t* stripe, int first, int lane) : tile(first) {
      const int64_t unit = kFormat.super_block() ? first >> 2 : first;
      const uint8_t* at =
          stripe + unit * kFormat.unit_bytes() + (kFormat.super_block() ? (first & 3) * kFormat.tile_bytes() : 0);
      codes = at + lane * (kLowWords >= 8 ? 16 : kLowWords * 4);
      high_codes = at + kGpuRows * kGpuTile * kFormat.low_bits / 8 + lane * kHighWords * 4;
      scales = at + kFormat.code_bytes() + (lane >> 2) * kScaleWords * 4;
      super = stripe + unit * kFormat.unit_bytes() + 4 * kFormat.tile_bytes() + (lane >> 2) * kSuperWords * 4;
      if constexpr (kTable) {
        table = stripe + unit * kFormat.unit_bytes() + 4 * kFormat.tile_bytes() + kFormat.super_row_bytes();
      }
    }
    __device__ __forceinline__ void advance() {
      int step = kFormat.tile_bytes();
      if constexpr (kFormat.super_block()) {
        const bool last = (tile & 3) == 3;
        step += last ? kFormat.super_bytes() : 0;
        super += last ? kFormat.unit_bytes() : 0;
        hold(super);
        if constexpr (kTable) {
          table += last ? kFormat.unit_bytes() : 0;
          hold(table);
        }
      }
      ++tile;
      codes += step;
      hold(codes);
      if constexpr (kHighWords != 0) {
        high_codes += step;
        hold(high_codes);
      }
      if constexpr (kScaleWords != 0) {
        scales += step;
        hold(scales);
      }
    }
    // Prefetches the codes `tiles` further on (their scales are in the same or the next line) into L2.
    __device__ __forceinline__ void prefetch(int tiles, int lane) const {
      constexpr int kLines = (kFormat.tile_bytes() + 127) / 128;
      constexpr int kLaneBytes = kLowWords >= 8 ? 16 : kLowWords * 4;
      if (lane < kLines) device::prefetch_l2(codes + tiles * kFormat.tile_bytes() + lane * (128 - kLaneBytes));
    }

   private:
    // Prevents the compiler from recomputing the address at every use.
    static __device__ __forceinline__ void hold(const uint8_t*& p) { asm volatile("" : "+l"(p)); }
  };

  __device__ __forceinline__ void load(const Cursor& at) {
    if constexpr (kLowWords >= 8) {  // 8-bit codes and floats: 512-byte runs
#pragma unroll
      for (int i = 0; i < kLowWords / 4; ++i) load_words<4>(low + 4 * i, at.codes + i * 512);
    } else {
      load_words<kLowWords>(low, at.codes);
    }
    if constexpr (kHighWords != 0) load_words<kHighWords>(high, at.high_codes);
    if constexpr (kScaleWords != 0) load_words<kScaleWords>(scale, at.scales);
    if constexpr (kSuperWords != 0) load_words<kSuperWords>(super, at.super);
    if constexpr (kTable) {
      load_words<4>(table, at.table);
      load_words<1>(&table_more, at.table + 16);
    }
    if constexpr (kFormat.low_bits == 16) zero = static_cast<uint32_t>(reinterpret_cast<uint64_t>(at.codes) >> 63);
  }

  // The same from shared memory: tile `tile` of a unit (four tiles for types with super-blocks).
  __device__ __forceinline__ void load_shared(const uint8_t* unit, int tile, int lane) {
    const uint8_t* at = unit + tile * kFormat.tile_bytes();
    const auto words = [](uint32_t* out, const uint8_t* from, auto count) {
      if constexpr (count() == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
      } else if constexpr (count() == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        out[0] = v.x, out[1] = v.y;
      } else {
        out[0] = *reinterpret_cast<const uint32_t*>(from);
      }
    };
    if constexpr (kLowWords >= 8) {
#pragma unroll
      for (int i = 0; i < kLowWords / 4; ++i) words(low + 4 * i, at + i * 512 + lane * 16, Count<4>{});
    } else {
      words(low, at + lane * kLowWords * 4, Count<kLowWords>{});
    }
    if constexpr (kHighWords != 0) {
      words(high, at + kGpuRows * kGpuTile * kFormat.low_bits / 8 + lane * kHighWords * 4, Count<kHighWords>{});
    }
    if constexpr (kScaleWords != 0) {
      words(scale, at + kFormat.code_bytes() + (lane >> 2) * kScaleWords * 4, Count<kScaleWords>{});
    }
    if constexpr (kSuperWords != 0) {
      words(super, unit + 4 * kFormat.tile_bytes() + (lane >> 2) * kSuperWords * 4, Count<kSuperWords>{});
    }
    if constexpr (kTable) {
      const uint8_t* of_unit = unit + 4 * kFormat.tile_bytes() + kFormat.super_row_bytes();
      words(table, of_unit, Count<4>{});
      words(&table_more, of_unit + 16, Count<1>{});
    }
  }

  // For a format with a table: scales are (byte & 254) − bias, and odd bytes shift the values of the table.
  __device__ __forceinline__ int table_bias() const { return static_cast<int>(table_more & 0xffu); }
  __device__ __forceinline__ int table_shift() const { return static_cast<int>(table_more << 16) >> 24; }

  // Scale (and min, negated if it is subtracted) of rows g and g + 8 for step kStep. For a format with a table, m is
  // the difference between 1024 + byte and the value.
  template <int kStep>
  __device__ __forceinline__ void scales(__half2 (&d)[2], __half2 (&m)[2]) const {
    if constexpr (kFormat.scale == GpuScale::d) {
      d[0] = kStep / 2 ? high2(as_half2(scale[0])) : low2(as_half2(scale[0]));
      d[1] = kStep / 2 ? high2(as_half2(scale[1])) : low2(as_half2(scale[1]));
    } else if constexpr (kFormat.scale == GpuScale::d_m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const __half2 both = as_half2(scale[2 * r + kStep / 2]);
        d[r] = low2(both), m[r] = high2(both);
      }
    } else if constexpr (kFormat.scale == GpuScale::d_scale16) {
      constexpr int kAt = kStep % 2 * 2;
      const float2 sc = __half22float2(bytes_to_half2<kAt, kAt + 1, 128>(scale[2 + kStep / 2]));
      const __half2 ds = __floats2half2_rn(__uint_as_float(scale[0]) * sc.x, __uint_as_float(scale[1]) * sc.y);
      d[0] = low2(ds), d[1] = high2(ds);
    } else if constexpr (kFormat.scale == GpuScale::e8m0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        d[r] = as_half2(e8m0_half((scale[0] >> (16 * (kStep / 2) + 8 * r)) & 0xffu) * 0x10001u);
      }
    } else if constexpr (kFormat.scale == GpuScale::k_min32) {
      const uint32_t word = scale[kStep / 2];
      const __half2 ds = __hmul2(as_half2(super[0]), bytes_to_half2<0, 1, 0>(word));
      const __half2 ms = __hneg2(__hmul2(as_half2(super[1]), bytes_to_half2<2, 3, 0>(word)));
      d[0] = low2(ds), d[1] = high2(ds), m[0] = low2(ms), m[1] = high2(ms);
    } else if constexpr (kFormat.scale == GpuScale::k_min16) {
      const uint32_t word = scale[kStep / 2];
      const uint32_t low_nibbles = word & 0x0f0f0f0fu, high_nibbles = (word >> 4) & 0x0f0f0f0fu;
      constexpr int kAt = kStep % 2 * 2;
      const __half2 ds = __hmul2(as_half2(super[0]), bytes_to_half2<kAt, kAt + 1, 0>(low_nibbles));
      const __half2 ms = __hneg2(__hmul2(as_half2(super[1]), bytes_to_half2<kAt, kAt + 1, 0>(high_nibbles)));
      d[0] = low2(ds), d[1] = high2(ds), m[0] = low2(ms), m[1] = high2(ms);
    } else if constexpr (kFormat.scale == GpuScale::k_scale16) {
      constexpr int kAt = kStep % 2 * 2;
      const __half2 ds = __hmul2(as_half2(super[0]), bytes_to_half2<kAt, kAt + 1, 128>(scale[kStep / 2]));
      d[0] = low2(ds), d[1] = high2(ds);
    } else if constexpr (kFormat.scale == GpuScale::f_table16) {
      constexpr int kAt = kStep % 2 * 2;
      const uint32_t word = scale[kStep / 2];
      const float2 sc = __half22float2(bytes_to_half2<kAt, kAt + 1, 0>(word & 0xfefefefeu));
      const auto bias = static_cast<float>(table_bias());
      const __half2 ds =
          __floats2half2_rn(__uint_as_float(super[0]) * (sc.x - bias), __uint_as_float(super[1]) * (sc.y - bias));
      d[0] = low2(ds), d[1] = high2(ds);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int shift = word >> (8 * (kAt + r)) & 1u ? table_shift() : 0;
        m[r] = __half2half2(__ushort_as_half(static_cast<unsigned short>(0x6480 - shift)));  // 1152 minus the shift
      }
    } else if constexpr (kFormat.scale == GpuScale::k_scale32) {
      constexpr int kAt = kStep / 2 * 2;
      const __half2 ds = __hmul2(as_half2(super[0]), bytes_to_half2<kAt, kAt + 1, 128>(scale[0]));
      d[0] = low2(ds), d[1] = high2(ds);
    }
  }

  // Pair j of step kStep as two integers below 1024 in the 16-bit halves of a word.
  template <int kStep, int kPair>
  __device__ __forceinline__ uint32_t magic_code() const {
    constexpr uint32_t kMagic = 0x64006400u;
    uint32_t code;
    if constexpr (kFormat.low_bits == 4) {
      code = and_or(low[kStep] >> (4 * kPair), 0x000f000fu, kMagic);
    } else {
      code = and_or(low[kStep / 2] >> (2 * (4 * (kStep % 2) + kPair)), 0x00030003u, kMagic);
    }
    if constexpr (kFormat.high_bits != 0) {
      constexpr int kAt = kFormat.high_bits == 1 ? 4 * kStep + kPair : 2 * (4 * (kStep % 2) + kPair);
      constexpr int kShift = kAt - kFormat.low_bits;  // moves the bits to just above the low ones
      const uint32_t word = high[kFormat.high_bits == 1 ? 0 : kStep / 2];
      const uint32_t moved = kShift >= 0 ? word >> (kShift & 31) : word << (-kShift & 31);
      code = and_or(moved, ((1u << kFormat.high_bits) - 1u) * 0x10001u << kFormat.low_bits, code);
    }
    return code;
  }

  // The same minus the offset, exact.
  template <int kStep, int kPair>
  __device__ __forceinline__ __half2 integer_pair() const {
    if constexpr (kFormat.low_bits == 4 && kFormat.high_bits == 0 && kPair % 2 == 1) {
      // The code is four bits higher: 1024 + 16·u. One shift serves two pairs.
      const uint32_t code = and_or(low[kStep] >> (kPair / 2 * 8), 0x00f000f0u, 0x64006400u);
      const __half2 sixteenth = as_half2(0x2c002c00u);
      return __hfma2(as_half2(code), sixteenth, __half2half2(__ushort_as_half(kFormat.offset == 8 ? 0xd480 : 0xd400)));
    } else {
      const __half2 magic = as_half2((0x6400u + kFormat.offset) * 0x10001u);
      return __hsub2(as_half2(magic_code<kStep, kPair>()), magic);
    }
  }

  template <int kStep, int kPair>
  __device__ __forceinline__ uint32_t scaled_pair(__half2 d, __half2 m) const {
    const __half2 q = integer_pair<kStep, kPair>();
    constexpr bool kMin =
        kFormat.scale == GpuScale::d_m || kFormat.scale == GpuScale::k_min32 || kFormat.scale == GpuScale::k_min16;
    return as_bits(kMin ? __hfma2(q, d, m) : __hmul2(q, d));
  }

  // The A operand of step kStep: registers 0 … 3 in the order of gpu_layout.h.
  template <int kStep>
  __device__ __forceinline__ void fragment(uint32_t (&a)[4]) const {
    if constexpr (kType == DType::f16) {
      // Copies to separate registers, which wgmma may read while the tile is overwritten. `zero` is 0, which the
      // compiler does not know.
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = low[4 * kStep + j] ^ zero;
    } else if constexpr (kType == DType::bf16) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = low[4 * kStep + j];
        a[j] = device::pack_half2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
      }
    } else {
      __half2 d[2], m[2];
      scales<kStep>(d, m);
      if constexpr (kFormat.low_bits == 8) {
        const uint32_t w0 = low[2 * kStep], w1 = low[2 * kStep + 1];
        a[0] = as_bits(__hmul2(bytes_to_half2<0, 1, 128>(w0), d[0]));
        a[1] = as_bits(__hmul2(bytes_to_half2<2, 3, 128>(w0), d[1]));
        a[2] = as_bits(__hmul2(bytes_to_half2<0, 1, 128>(w1), d[0]));
        a[3] = as_bits(__hmul2(bytes_to_half2<2, 3, 128>(w1), d[1]));
      } else if constexpr (kFormat.codebook == GpuCodebook::iq4nl) {
        uint32_t bytes[2];
        iq4nl_bytes(low[kStep], bytes);
        a[0] = as_bits(__hmul2(bytes_to_half2<0, 2, 128>(bytes[0]), d[0]));
        a[1] = as_bits(__hmul2(bytes_to_half2<0, 2, 128>(bytes[1]), d[1]));
        a[2] = as_bits(__hmul2(bytes_to_half2<1, 3, 128>(bytes[0]), d[0]));
        a[3] = as_bits(__hmul2(bytes_to_half2<1, 3, 128>(bytes[1]), d[1]));
      } else if constexpr (kTable) {
        uint32_t bytes[2];
        table_bytes(table, low[kStep], bytes);
        a[0] = as_bits(__hmul2(__hsub2(bytes_above<0, 2>(bytes[0]), m[0]), d[0]));
        a[1] = as_bits(__hmul2(__hsub2(bytes_above<0, 2>(bytes[1]), m[1]), d[1]));
        a[2] = as_bits(__hmul2(__hsub2(bytes_above<1, 3>(bytes[0]), m[0]), d[0]));
        a[3] = as_bits(__hmul2(__hsub2(bytes_above<1, 3>(bytes[1]), m[1]), d[1]));
      } else if constexpr (kFormat.codebook == GpuCodebook::mxfp4) {
        const __half2 up = as_half2(0x74007400u);  // 2^14
        mxfp4_halves(low[kStep], a);
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = as_bits(__hmul2(__hmul2(as_half2(a[j]), up), d[j % 2]));
      } else {
        a[0] = scaled_pair<kStep, 0>(d[0], m[0]);
        a[1] = scaled_pair<kStep, 1>(d[1], m[1]);
        a[2] = scaled_pair<kStep, 2>(d[0], m[0]);
        a[3] = scaled_pair<kStep, 3>(d[1], m[1]);
      }
    }
  }
};

// Calls f<0>() … f<3>(), for the steps of a tile.
template <typename F>
__device__ __forceinline__ void for_each_step(F&& f) {
  f.template operator()<0>();
  f.template operator()<1>();
  f.template operator()<2>();
  f.template operator()<3>();
}

}  // namespace dyno::ops::cuda
