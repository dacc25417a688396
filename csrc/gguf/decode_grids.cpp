// Types whose codes come from grids: IQ1, IQ2 and IQ3 (block layouts: GGUF specification and the public `gguf`
// package).
#include <bit>

#include "gguf/decode_bits.h"
#include "gguf/grids.h"

namespace dyno {
namespace {

// Eight codes of two bits with a sign each: codes of grid2.
void put_eight(uint16_t entry, unsigned signs, uint8_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>((entry >> (2 * i) & 3) | (signs >> i & 1u) << 2);
}
// Four codes of three bits with a sign each: codes of grid3xxs and grid3s.
void put_four(uint16_t entry, unsigned signs, uint8_t* out) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>((entry >> (3 * i) & 7) | (signs >> i & 1u) << 3);
}
// Eight codes of two bits: codes of grid1.
void put_plain(uint16_t entry, uint8_t* out) {
  for (int i = 0; i < 8; ++i) out[i] = static_cast<uint8_t>(entry >> (2 * i) & 3);
}
// Seven signs are stored; the eighth one makes the number of negative signs even.
unsigned eight_signs(unsigned seven) { return seven | static_cast<unsigned>(std::popcount(seven) & 1) << 7; }

int odd(unsigned scale) { return static_cast<int>(2 * scale + 1); }

}  // namespace

// f16 d, 8 x (4 grid indices, a word of 4 x 7 signs and a scale of 4 bits)
void decode_iq2_xxs(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int sub = 0; sub < 8; ++sub) {
    const uint8_t* index = block + 2 + 8 * sub;
    const uint32_t word = load_u32(index + 4);
    out.scale[sub] = scale_of(odd(word >> 28));
    for (int i = 0; i < 4; ++i) {
      put_eight(kGrid2Xxs[index[i]], eight_signs(word >> (7 * i) & 127u), out.code + 32 * sub + 8 * i);
    }
  }
}

// f16 d, 32 words of 9 bits of index and 7 signs, 16 scales of 4 bits
void decode_iq2_xs(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int i = 0; i < 32; ++i) {
    const uint16_t word = load_u16(block + 2 + 2 * i);
    put_eight(kGrid2Xs[word & 511], eight_signs(word >> 9), out.code + 8 * i);
  }
  for (int i = 0; i < 16; ++i) out.scale[i] = scale_of(odd(static_cast<unsigned>(nibble(block + 66, i))));
}

// f16 d, 32 low bytes of indices, 32 bytes of signs, 32 x 2 upper bits, 16 scales of 4 bits
void decode_iq2_s(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int i = 0; i < 32; ++i) {
    const int high = block[66 + i / 4] >> (i % 4 * 2) & 3;
    put_eight(kGrid2S[block[2 + i] | high << 8], block[34 + i], out.code + 8 * i);
  }
  for (int i = 0; i < 16; ++i) out.scale[i] = scale_of(odd(static_cast<unsigned>(nibble(block + 74, i))));
}

// f16 d, 64 grid indices, 8 words of 4 x 7 signs and a scale of 4 bits
void decode_iq3_xxs(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int sub = 0; sub < 8; ++sub) {
    const uint32_t word = load_u32(block + 66 + 4 * sub);
    out.scale[sub] = scale_of(odd(word >> 28));
    for (int i = 0; i < 8; ++i) {
      const unsigned signs = eight_signs(word >> (i / 2 * 7) & 127u) >> (i % 2 * 4);
      put_four(kGrid3Xxs[block[2 + 8 * sub + i]], signs, out.code + 32 * sub + 4 * i);
    }
  }
}

// f16 d, 64 low bytes of indices, 8 bytes of their upper bits, 32 bytes of signs, 8 scales of 4 bits
void decode_iq3_s(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  for (int i = 0; i < 64; ++i) {
    const int index = block[2 + i] | bit(block[66 + i / 8], i % 8) << 8;
    put_four(kGrid3S[index], static_cast<unsigned>(nibble(block + 74, i)), out.code + 4 * i);
  }
  for (int i = 0; i < 8; ++i) out.scale[i] = scale_of(odd(static_cast<unsigned>(nibble(block + 106, i))));
}

// f16 d, 32 low bytes of indices, 8 words of 4 x 3 upper bits, a scale of 3 bits and the sign of the eighth
void decode_iq1_s(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(block);
  out.shifted = 0;
  for (int sub = 0; sub < 8; ++sub) {
    const unsigned word = load_u16(block + 34 + 2 * sub);
    out.scale[sub] = scale_of(odd(word >> 12 & 7u));
    out.shifted |= static_cast<uint32_t>(word >> 15 ^ 1u) << sub;
    for (int i = 0; i < 4; ++i) {
      put_plain(kGrid1[block[2 + 4 * sub + i] | (word >> (3 * i) & 7u) << 8], out.code + 32 * sub + 8 * i);
    }
  }
}

// 32 low bytes of indices, 32 x (3 upper bits and the sign of the eighth), 4 words of 4 x 3 bits of scale and 4 bits of
// d
void decode_iq1_m(const uint8_t*, const uint8_t* block, CodedBlock& out) {
  out.d_half = 0;
  out.shifted = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned word = load_u16(block + 48 + 2 * i);
    out.d_half = static_cast<uint16_t>(out.d_half | word >> 12 << (4 * i));
    for (int j = 0; j < 4; ++j) out.scale[4 * i + j] = scale_of(odd(word >> (3 * j) & 7u));
  }
  for (int i = 0; i < 32; ++i) {
    const int high = nibble(block + 32, i);
    out.shifted |= static_cast<uint32_t>(high >> 3 ^ 1) << i;
    put_plain(kGrid1[block[i] | (high & 7) << 8], out.code + 8 * i);
  }
}

// A row of iq1_s_r4. Row: f16 d. 4 low bytes of indices, a word as in iq1_s
void decode_iq1_s_row(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(meta);
  const unsigned word = load_u16(block + 4);
  out.scale[0] = scale_of(odd(word >> 12 & 7u));
  out.shifted = word >> 15 ^ 1u;
  for (int i = 0; i < 4; ++i) put_plain(kGrid1[block[i] | (word >> (3 * i) & 7u) << 8], out.code + 8 * i);
}

// A row of iq1_m_r4. Row: f16 d. 4 low bytes of indices, 4 x (3 upper bits and the sign of the eighth), 2 scales of 4
// bits
void decode_iq1_m_row(const uint8_t* meta, const uint8_t* block, CodedBlock& out) {
  out.d_half = load_u16(meta);
  out.shifted = 0;
  out.scale[0] = scale_of(block[6] & 15);
  out.scale[1] = scale_of(block[6] >> 4);
  for (int i = 0; i < 4; ++i) {
    const int high = nibble(block + 4, i);
    out.shifted |= static_cast<uint32_t>(high >> 3 ^ 1) << i;
    put_plain(kGrid1[block[i] | (high & 7) << 8], out.code + 8 * i);
  }
}

}  // namespace dyno
