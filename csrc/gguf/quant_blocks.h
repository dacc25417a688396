// Block layouts of the quantised GGUF types, their codebooks and the helpers that unpack scales and halves.
//
// Included by kernel sources that are compiled once per instruction set, so everything here has internal linkage
// (`static`): an inline function with external linkage could be merged across instruction sets by the linker.
// Values: w = d·q (symmetric types), w = d·q + m (the `_1` types), w = d·sc·q − dmin·m (q2_k, q4_k, q5_k).
// `d`, `m`, `dmin` are IEEE binary16 bit patterns. Blocks of files need 2-byte alignment at most; all fields are
// little-endian.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF blocks are read in place: a little-endian machine is needed"
#endif

namespace dyno {

inline constexpr int kQuantBlock = 32;  // elements of a block of the plain types, of iq4_nl and mxfp4
inline constexpr int kQ8_16Block = 64;
inline constexpr int kSuperBlock = 256;  // elements of a super-block of the K types and iq4_xs

// ---- 32-element blocks: element i is the low nibble of byte i, element i + 16 the high nibble ---------------------

struct BlockQ4_0 {
  uint16_t d;
  uint8_t qs[16];  // w = d·(q − 8)
};
struct BlockQ4_1 {
  uint16_t d;
  uint16_t m;
  uint8_t qs[16];
};
struct BlockQ5_0 {
  uint16_t d;
  uint8_t qh[4];   // bit i of this 32-bit word: fifth bit of element i
  uint8_t qs[16];  // w = d·(q − 16)
};
struct BlockQ5_1 {
  uint16_t d;
  uint16_t m;
  uint8_t qh[4];
  uint8_t qs[16];
};
struct BlockQ8_0 {
  uint16_t d;
  int8_t qs[32];
};
struct BlockIq4Nl {
  uint16_t d;
  uint8_t qs[16];  // w = d·kIq4NlValues[q]
};
struct BlockMxfp4 {
  uint8_t e;       // power of two, e8m0
  uint8_t qs[16];  // w = e8m0_half_to_f32(e)·kMxfp4Values[q]
};

// ---- 256-element super-blocks ------------------------------------------------------------------------------------

// Sub-blocks of 16. Element 128·h + 32·s + i (h < 2, s < 4, i < 32) is bits 2s of qs[32·h + i].
struct BlockQ2K {
  uint8_t scales[16];  // low nibble: scale, high nibble: min
  uint8_t qs[64];
  uint16_t d;
  uint16_t dmin;
};
// As q2_k; the third bit of element 32·g + i (g < 8) is bit g of hmask[i], and a clear bit subtracts 4.
struct BlockQ3K {
  uint8_t hmask[32];
  uint8_t qs[64];
  uint8_t scales[12];  // unpack_scales_q3_k
  uint16_t d;
};
// Sub-blocks of 32. Element 64·g + i is the low nibble of qs[32·g + i], element 64·g + 32 + i the high nibble.
struct BlockQ4K {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];  // unpack_scales_k4
  uint8_t qs[128];
};
// As q4_k; the fifth bit of element 32·s + i is bit s of qh[i].
struct BlockQ5K {
  uint16_t d;
  uint16_t dmin;
  uint8_t scales[12];
  uint8_t qh[32];
  uint8_t qs[128];
};
// Sub-blocks of 16. With h < 2 and i < 64, element 128·h + i has the low nibble of ql[64·h + i] and element
// 128·h + 64 + i the high nibble; the upper two bits of element 128·h + 32·s + i are bits 2s of qh[32·h + i].
struct BlockQ6K {
  uint8_t ql[128];
  uint8_t qh[64];
  int8_t scales[16];
  uint16_t d;  // w = d·sc·(q − 32)
};
// Sub-blocks of 32, each laid out as an iq4_nl block: w = d·sc·kIq4NlValues[q].
struct BlockIq4Xs {
  uint16_t d;
  uint16_t scales_h;  // unpack_scales_iq4_xs
  uint8_t scales_l[4];
  uint8_t qs[128];
};

// ---- Forms of other types on a GPU (gguf/recode.h) ---------------------------------------------------------------

struct BlockQ8_16 {
  float d;
  int8_t scales[kQ8_16Block / 16];
  int8_t qs[kQ8_16Block];  // w = d·sc·q
};

// w = d·sc·(table[q] + shift). The byte of 16 elements gives sc = (byte & 254) − bias, and the shift applies if the
// byte is odd. Element 32·s + i (i < 16) is the low nibble of qs[16·s + i], element 32·s + 16 + i the high nibble. All
// blocks of a matrix have the same table, bias and shift.
struct BlockQ4_16 {
  float d;
  uint8_t scales[16];
  int8_t table[16];  // the first half below zero, the second one 0 … 126
  uint8_t bias;
  int8_t shift;
  uint8_t unused[2];
  uint8_t qs[128];
};

static_assert(sizeof(BlockQ8_16) == 72 && sizeof(BlockQ4_16) == 168);
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ5_0) == 22 && sizeof(BlockQ5_1) == 24);
static_assert(sizeof(BlockQ8_0) == 34 && sizeof(BlockIq4Nl) == 18 && sizeof(BlockMxfp4) == 17);
static_assert(sizeof(BlockQ2K) == 84 && sizeof(BlockQ3K) == 110 && sizeof(BlockQ4K) == 144 && sizeof(BlockQ5K) == 176);
static_assert(sizeof(BlockQ6K) == 210 && sizeof(BlockIq4Xs) == 136);

// ---- Codebooks ---------------------------------------------------------------------------------------------------

inline constexpr int8_t kIq4NlValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// e2m1 values doubled, so that they are integers; e8m0_half_to_f32 carries the factor ½. Code 8 is +0, not −0.
inline constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// ---- Float formats -----------------------------------------------------------------------------------------------

// Exact; NaNs keep their bits.
static constexpr float f16_to_f32(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    return __builtin_bit_cast(float, sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude >= 0x0400u) return __builtin_bit_cast(float, sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, subnormal));
}

// Round to nearest even; overflow gives infinity, NaNs stay NaN (quiet).
static constexpr uint16_t f32_to_f16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half = 0;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, half-way between the largest half and 2^16
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Adding ½ leaves a last place of 2^-24, the step of subnormal halves, so the addition does the rounding.
    half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

static constexpr float bf16_to_f32(uint16_t bits) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even; NaNs stay NaN (quiet).
static constexpr uint16_t f32_to_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 64u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Half of 2^(e − 127), for use with kMxfp4Values. Exact for every e; 0 and 1 give subnormal floats.
static constexpr float e8m0_half_to_f32(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
  return __builtin_bit_cast(float, bits);
}

// ---- Scales ------------------------------------------------------------------------------------------------------

// The eight 6-bit scales and mins of q4_k and q5_k. Bytes 0–3 and 4–7 hold scales and mins 0–3 in their low 6 bits;
// bytes 8–11 the low nibbles of scales and mins 4–7, whose upper two bits are the upper bits of bytes 0–3 and 4–7.
static constexpr void unpack_scales_k4(const uint8_t packed[12], uint8_t scales[8], uint8_t mins[8]) {
  for (int i = 0; i < 4; ++i) {
    scales[i] = packed[i] & 0x3f;
    mins[i] = packed[i + 4] & 0x3f;
    scales[i + 4] = static_cast<uint8_t>((packed[i + 8] & 0x0f) | ((packed[i] >> 2) & 0x30));
    mins[i + 4] = static_cast<uint8_t>((packed[i + 8] >> 4) | ((packed[i + 4] >> 2) & 0x30));
  }
}

// The sixteen scales of q3_k, −32 … 31. Low nibbles: bytes 0–7, low halves first; upper two bits: bytes 8–11.
static constexpr void unpack_scales_q3_k(const uint8_t packed[12], int8_t scales[16]) {
  for (int i = 0; i < 16; ++i) {
    const int low = (packed[i % 8] >> (i / 8 * 4)) & 0x0f;
    const int high = (packed[8 + i % 4] >> (i / 4 * 2)) & 0x03;
    scales[i] = static_cast<int8_t>((low | (high << 4)) - 32);
  }
}

// The eight scales of iq4_xs, −32 … 31.
static constexpr void unpack_scales_iq4_xs(uint16_t high_bits, const uint8_t low_nibbles[4], int8_t scales[8]) {
  for (int i = 0; i < 8; ++i) {
    const int low = (low_nibbles[i / 2] >> (i % 2 * 4)) & 0x0f;
    const int high = (high_bits >> (2 * i)) & 0x03;
    scales[i] = static_cast<int8_t>((low | (high << 4)) - 32);
  }
}

}  // namespace dyno
