// The codebook and trellis types of ik_llama.cpp (layouts and values: its quantiser, ggml-common.h and
// iqk_quantize.cpp).
#include <cstdlib>

#include "gguf/codebooks.h"
#include "gguf/decode_bits.h"

namespace dyno {
namespace {

// Two-bit codes: value i of a half of 128 is bits 2 * (i / 32) of byte i % 32.
int two_bits(const uint8_t* q, int i) { return q[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3; }
// Nibbles: the first half of each run of 32 values is low nibbles, the second high ones.
int nibble_of_32(const uint8_t* q, int i) { return q[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15; }
// Nibbles: of each 64 values, the first 32 are low ones.
int nibble_of_64(const uint8_t* q, int i) { return q[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15; }
// One more bit: value i is bit i / 32 of byte i % 32.
int bit_plane(const uint8_t* q, int i) { return bit(q[i % 32], i / 32); }

void put(CodedBlock& out, int i, int code) { out.code[i] = static_cast<uint8_t>(code); }

// A scale of seven bits in steps of two, and whether its values are shifted.
void put_wide_scale(CodedBlock& out, int sub, int byte) {
  out.scale[sub] = scale_of((byte & 254) - 127);
  out.shifted |= static_cast<uint32_t>(byte & 1) << sub;
}

// The trellis: `count` values of a generator with the initial state `seed`. Each value is the sum of four six-bit
// numbers minus 126.
constexpr uint32_t kGenerator = 0xcbac1fed;
int next_value(uint32_t& state) {
  state *= kGenerator;
  const uint32_t six = state & 0x3f3f3f3fu;
  return static_cast<int>((six & 255u) + (six >> 8 & 255u) + (six >> 16 & 255u) + (six >> 24)) - 126;
}
void put_run(CodedBlock& out, int at, uint32_t seed, int count) {
  for (int i = 0; i < count; ++i) put(out, at + i, next_value(seed) + 128);
}
constexpr uint32_t kSeedOffset = 4096;
int trellis_scale(int code) { return codebook::iq4nl.values[code]; }

}  // namespace

// f16 d, 16 shift bits, 16 scales of 4 bits, 256 x 2 bits
void decode_iq2_k(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  out.shifted = load_u16(block + 2);
  for (int i = 0; i < 16; ++i) out.scale[i] = scale_of(nibble(block + 4, i) - 8);
  for (int i = 0; i < 256; ++i) put(out, i, two_bits(block + 12, i));
}

// Row: f16 d. 8 shift bits and 8 upper bits of scales, 8 scales of 4 bits, 256 x 2 bits
void decode_iq2_ks(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(meta);
  const uint16_t extra = load_u16(block);
  out.shifted = extra & 255u;
  for (int i = 0; i < 8; ++i) out.scale[i] = scale_of((nibble(block + 2, i) | bit(extra, 8 + i) << 4) - 16);
  for (int i = 0; i < 256; ++i) put(out, i, two_bits(block + 6, i));
}

// Row: f16 d. 8 x 2 upper and 8 x 4 lower bits of scales, 128 pairs of values as 4 + 1 bits
void decode_iq2_kl(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  // The pair of iq3k values for each code, low nibble first.
  static constexpr uint8_t kPairs[32] = {0x20, 0x50, 0x01, 0x31, 0x51, 0x71, 0x12, 0x22, 0x42, 0x52, 0x62,
                                         0x03, 0x43, 0x53, 0x73, 0x24, 0x34, 0x44, 0x54, 0x64, 0x15, 0x25,
                                         0x35, 0x45, 0x55, 0x06, 0x26, 0x46, 0x66, 0x76, 0x27, 0x57};
  out.d_half = load_u16(meta);
  const uint16_t high = load_u16(block);
  for (int i = 0; i < 8; ++i) {
    const int low = block[2 + i % 4] >> (i / 4 * 4) & 15;
    out.scale[i] = scale_of((low | (high >> (2 * i) & 3) << 4) - 32);
  }
  for (int i = 0; i < 128; ++i) {
    const int sub = i / 16;
    const int low = block[6 + i / 32 * 16 + i % 16] >> (sub % 2 * 4) & 15;
    const uint8_t pair = kPairs[low | bit(block[70 + i % 16], sub) << 4];
    put(out, 2 * i, pair & 15);
    put(out, 2 * i + 1, pair >> 4);
  }
}

// f16 d, 16 shift bits, 16 signs and 16 x 4 bits of scales, 256 x 2 bits, 256 x 1 bit
void decode_iq3_k(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  out.shifted = load_u16(block + 2);
  const uint16_t negative = load_u16(block + 4);
  for (int i = 0; i < 16; ++i) {
    const int magnitude = 2 * nibble(block + 6, i) + 1;
    out.scale[i] = scale_of(bit(negative, i) != 0 ? -magnitude : magnitude);
  }
  for (int i = 0; i < 256; ++i) put(out, i, two_bits(block + 14, i) | bit_plane(block + 78, i) << 2);
}

// Row: f16 d. 8 upper bits of scales and 8 shift bits, 8 scales of 4 bits, 256 x 2 bits, 256 x 1 bit
void decode_iq3_ks(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(meta);
  const uint16_t extra = load_u16(block);
  out.shifted = extra >> 8;
  for (int i = 0; i < 8; ++i) {
    const int low = block[2 + i % 4] >> (i / 4 * 4) & 15;
    out.scale[i] = scale_of((low | bit(extra, i) << 4) - 16);
  }
  for (int i = 0; i < 256; ++i) put(out, i, two_bits(block + 6, i) | bit_plane(block + 70, i) << 2);
}

// f16 d, 16 shift bits, 16 x 2 upper and 16 x 4 lower bits of scales, 256 x 4 bits
void decode_iq4_k(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  out.shifted = load_u16(block + 2);
  const uint32_t high = load_u32(block + 4);
  for (int i = 0; i < 16; ++i) {
    out.scale[i] = scale_of((nibble(block + 8, i) | static_cast<int>(high >> (2 * i) & 3u) << 4) - 32);
  }
  for (int i = 0; i < 256; ++i) put(out, i, nibble_of_32(block + 16, i));
}

// As iq4_k, and 256 x 1 bit
void decode_iq5_k(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  out.shifted = load_u16(block + 2);
  const uint32_t high = load_u32(block + 4);
  for (int i = 0; i < 16; ++i) {
    out.scale[i] = scale_of((nibble(block + 8, i) | static_cast<int>(high >> (2 * i) & 3u) << 4) - 32);
  }
  for (int i = 0; i < 256; ++i) put(out, i, nibble_of_64(block + 16, i) | bit_plane(block + 144, i) << 4);
}

// Row: f32 d. 8 scales of 7 bits with a shift bit, 256 x 4 bits
void decode_iq4_ks(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta);
  out.shifted = 0;
  for (int i = 0; i < 8; ++i) put_wide_scale(out, i, block[i]);
  for (int i = 0; i < 256; ++i) put(out, i, nibble_of_32(block + 8, i));
}

// Row: f32 d. 8 scales of 7 bits with a shift bit, 256 x 4 bits, 256 x 1 bit
void decode_iq5_ks(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta);
  out.shifted = 0;
  for (int i = 0; i < 8; ++i) put_wide_scale(out, i, block[i]);
  for (int i = 0; i < 256; ++i) put(out, i, nibble_of_64(block + 8, i) | bit_plane(block + 136, i) << 4);
}

// Row: f32 d. 8 x 8 words: the lowest bits are the scale, the other 15 are four codes in Gray code of three steps
void decode_iq4_kss(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta);
  out.shifted = 0;
  for (int sub = 0; sub < 8; ++sub) {
    int scale = 0;
    uint8_t codes[16];
    for (int i = 0; i < 8; ++i) {
      const unsigned word = load_u16(block + 16 * sub + 2 * i);
      scale |= static_cast<int>(word & 1u) << i;
      unsigned q = word & 0xfffeu;
      q ^= q >> 1;
      codes[2 * i] = static_cast<uint8_t>(q);
      codes[2 * i + 1] = static_cast<uint8_t>(q >> 8);
    }
    put_wide_scale(out, sub, scale);
    for (int i = 0; i < 32; ++i) put(out, 32 * sub + i, codes[i % 16] >> (i / 16 * 4) & 15);
  }
}

// Row: f32 d. 8 scales of 4 bits with the 13th bits of four seeds each, 32 low bytes and 32 x 4 bits of seeds
void decode_iq1_kt(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta);
  for (int sub = 0; sub < 8; ++sub) {
    const uint8_t head = block[sub];
    out.scale[sub] = scale_of(trellis_scale(head & 15));
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * sub + i;
      const uint32_t seed = block[8 + at] | (block[40 + at % 16] >> (at / 16 * 4) & 15u) << 8 |
                            static_cast<uint32_t>(bit(head, 4 + i)) << 12;
      put_run(out, 8 * at, seed + kSeedOffset, 8);
    }
  }
}

// Row: f32 d. 8 scales of 4 bits, 32 seeds
void decode_iq2_kt(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta) * 1.05f;  // the factor in the products of the engine that writes this type
  for (int i = 0; i < 8; ++i) out.scale[i] = scale_of(trellis_scale(block[i % 4] >> (i / 4 * 4) & 15));
  for (int i = 0; i < 32; ++i) put_run(out, 8 * i, load_u16(block + 4 + 2 * i) + kSeedOffset, 8);
}

// Row: f32 d. 8 scales of 4 bits, 32 seeds of magnitudes, 256 signs
void decode_iq3_kt(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta) * 1.01f;  // as in iq2_kt
  for (int i = 0; i < 8; ++i) out.scale[i] = scale_of(block[i % 4] >> (i / 4 * 4) & 15);
  for (int i = 0; i < 32; ++i) {
    uint32_t seed = load_u16(block + 4 + 2 * i) + kSeedOffset;
    for (int j = 8 * i; j < 8 * i + 8; ++j) {
      const int magnitude = std::abs(next_value(seed));
      put(out, j, 128 + (bit_plane(block + 68, j) != 0 ? -magnitude : magnitude));
    }
  }
}

// Row: f32 d. 8 words: a bit of the seeds' offset, a scale of 7 bits, 8 x 3 upper bits of seeds; then 64 low bytes and
// 64 x 4 bits of seeds
void decode_iq4_kt(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d = load_f32(meta);
  for (int sub = 0; sub < 8; ++sub) {
    const uint32_t head = load_u32(block + 4 * sub);
    out.scale[sub] = scale_of(static_cast<int>(head >> 1 & 127u) - 64);
    const uint32_t offset = kSeedOffset + (head & 1u) * 32768u;
    for (int i = 0; i < 8; ++i) {
      const int at = 8 * sub + i;
      const uint32_t seed =
          block[32 + at] | (block[96 + at % 32] >> (at / 32 * 4) & 15u) << 8 | (head >> (8 + 3 * i) & 7u) << 12;
      put_run(out, 4 * at, seed + offset, 4);
    }
  }
}

}  // namespace dyno
