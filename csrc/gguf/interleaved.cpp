// Layouts: ik_llama.cpp, ggml-common.h and the dequantisation of iqk_quantize.cpp.
//
// A block of a unit has the fields of the plain block, each for all rows. `from` is such a block, `row` the row within
// the unit, and `to` its plain block, which must be zeroed before.
#include "gguf/interleaved.h"

#include <cstring>

#include "core/error.h"
#include "gguf/decode_bits.h"

namespace dyno {
namespace {

void put_u16(uint8_t* p, unsigned value) {
  const auto x = static_cast<uint16_t>(value);
  std::memcpy(p, &x, 2);
}
void put_u32(uint8_t* p, uint32_t x) { std::memcpy(p, &x, 4); }
void add_bits(uint8_t& byte, int value, int shift) { byte = static_cast<uint8_t>(byte | value << shift); }
int low_bits(int byte, int shift, int bits) { return byte >> shift & ((1 << bits) - 1); }

// The position of value `at` of 32 in units of four rows, whose bytes have values 8 (nibbles) or 4 (two bits) apart.
struct At {
  int half, quarter, upper, i;
  explicit At(int at) : half(at / 16), quarter(at % 8 / 4), upper(at % 16 / 8), i(at % 4) {}
};
int nibble_r4(const uint8_t* q, int row, int at) {
  const At a(at);
  return low_bits(q[4 * row + a.i + 16 * (a.half + 2 * a.quarter)], 4 * a.upper, 4);
}
int two_bits_r4(const uint8_t* q, int row, int at) {
  return low_bits(q[4 * row + at % 4 + 16 * (at / 16)], at % 16 / 4 * 2, 2);
}

// The inverse of decode_*.cpp and of quant_blocks.h: value i of a plain block.
void put_two_bits(uint8_t* q, int i, int v) { add_bits(q[i / 128 * 32 + i % 32], v, i / 32 % 4 * 2); }
void put_nibble_of_32(uint8_t* q, int i, int v) { add_bits(q[i / 32 * 16 + i % 16], v, i % 32 / 16 * 4); }
void put_nibble_of_64(uint8_t* q, int i, int v) { add_bits(q[i / 64 * 32 + i % 32], v, i % 64 / 32 * 4); }
void put_plane(uint8_t* q, int i, int v) { add_bits(q[i % 32], v, i / 32); }
void put_nibble(uint8_t* q, int i, int v) { add_bits(q[i / 2], v, i % 2 * 4); }

// The index of a row's scale `sub` (of 16) in a unit of four rows. Its lower part is a nibble, its upper part two bits.
int scale_at(int sub, int row) { return 8 * (sub / 2) + row + 4 * (sub % 2); }
int lower_scale(const uint8_t* q, int at) { return low_bits(q[at % 32], 4 * (at / 32), 4); }
int upper_scale(const uint8_t* q, int at) { return low_bits(q[at % 16], 2 * (at / 16), 2); }

void copy_half(const uint8_t* from, int row, uint8_t* to) { std::memcpy(to, from + 2 * row, 2); }

// ---- floats ---------------------------------------------------------------------------------------------------------

void bf16_r16(const uint8_t* from, int row, uint8_t* to) { std::memcpy(to, from + 4 * row, 4); }

// ---- blocks of 32 --------------------------------------------------------------------------------------------------

void q4_0_r8(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int j = 0; j < 16; ++j) to[2 + j] = from[16 + 32 * (j / 4) + 4 * row + j % 4];
}
void mxfp4_r8(const uint8_t* from, int row, uint8_t* to) {
  to[0] = from[row];
  for (int j = 0; j < 16; ++j) to[1 + j] = from[8 + 32 * (j / 4) + 4 * row + j % 4];
}
void q8_0_r8(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int j = 0; j < 32; ++j) to[2 + j] = from[16 + 32 * (j / 4) + 4 * row + j % 4];
}
void iq4_nl_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int i = 0; i < 32; ++i) put_nibble_of_32(to + 2, i, nibble_r4(from + 8, row, i));
}
void q5_0_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int i = 0; i < 32; ++i) {
    const At a(i);
    put_nibble_of_32(to + 6, i, nibble_r4(from + 24, row, i));
    add_bits(to[2 + i / 8], low_bits(from[8 + 4 * row + a.i], a.half + 2 * a.quarter + 4 * a.upper, 1), i % 8);
  }
}
void q6_0_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int i = 0; i < 32; ++i) {
    const At a(i);
    const int high = low_bits(from[8 + 4 * row + a.i + 16 * a.half], 2 * a.quarter + 4 * a.upper, 2);
    put_nibble_of_32(to + 10, i, nibble_r4(from + 40, row, i));
    add_bits(to[2 + i % 8], high, i % 16 / 8 * 4 + i / 16 * 2);
  }
}
void iq1_s_r4(const uint8_t* from, int row, uint8_t* to) {
  for (int i = 0; i < 4; ++i) to[i] = from[4 * i + row];
  std::memcpy(to + 4, from + 16 + 2 * row, 2);
}
void iq1_m_r4(const uint8_t* from, int row, uint8_t* to) {
  for (int i = 0; i < 4; ++i) to[i] = from[4 * i + row];
  for (int i = 0; i < 2; ++i) to[4 + i] = from[16 + 4 * i + row];
  to[6] = from[24 + row];
}
void iq2_bn_r4(const uint8_t* from, int row, uint8_t* to) {
  for (int i = 0; i < 64; ++i) {
    add_bits(to[i % 16], low_bits(from[4 * row + i % 4 + 16 * (i / 16)], i % 16 / 4 * 2, 2), i / 16 * 2);
  }
}

void q8_kv_r8(const uint8_t* from, int row, uint8_t* to) {
  for (int j = 0; j < 32; ++j) to[j] = from[32 * (j / 4) + 4 * row + j % 4];
}

// ---- K types -------------------------------------------------------------------------------------------------------

void q2_k_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to + 80);
  copy_half(from, row + 4, to + 82);
  for (int sub = 0; sub < 16; ++sub) to[sub] = from[16 + scale_at(sub, row)];
  for (int i = 0; i < 256; ++i) put_two_bits(to + 16, i, two_bits_r4(from + 80 + i / 32 * 32, row, i % 32));
}
void q3_k_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to + 108);
  for (int sub = 0; sub < 16; ++sub) {
    const int at = scale_at(sub, row);
    add_bits(to[96 + sub % 8], lower_scale(from + 24, at), sub / 8 * 4);
    add_bits(to[104 + sub % 4], upper_scale(from + 8, at), sub / 4 * 2);
  }
  for (int i = 0; i < 256; ++i) {
    put_two_bits(to + 32, i, two_bits_r4(from + 184 + i / 32 * 32, row, i % 32));
    put_plane(to, i, low_bits(from[56 + i / 32 * 16 + 4 * row + i % 4], i % 32 / 4, 1));
  }
}
// d, dmin and the 6-bit scales and minima of q4_k and q5_k.
void k4_scales(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  copy_half(from, row + 4, to + 2);
  int scale[8], least[8];
  for (int sub = 0; sub < 8; ++sub) {
    const int at = 4 * sub + row;
    const int low = from[32 + at], high = from[16 + at % 16] >> (4 * (at / 16));
    scale[sub] = (low & 15) | (high & 3) << 4;
    least[sub] = low >> 4 | (high >> 2 & 3) << 4;
  }
  for (int j = 0; j < 4; ++j) {
    to[4 + j] = static_cast<uint8_t>(scale[j] | scale[j + 4] >> 4 << 6);
    to[8 + j] = static_cast<uint8_t>(least[j] | least[j + 4] >> 4 << 6);
    to[12 + j] = static_cast<uint8_t>((scale[j + 4] & 15) | (least[j + 4] & 15) << 4);
  }
}
void q4_k_r4(const uint8_t* from, int row, uint8_t* to) {
  k4_scales(from, row, to);
  for (int i = 0; i < 256; ++i) put_nibble_of_64(to + 16, i, nibble_r4(from + 64 + i / 32 * 64, row, i % 32));
}
void q5_k_r4(const uint8_t* from, int row, uint8_t* to) {
  k4_scales(from, row, to);
  for (int i = 0; i < 256; ++i) {
    const At a(i % 32);
    put_nibble_of_64(to + 48, i, nibble_r4(from + 192 + i / 32 * 64, row, i % 32));
    put_plane(to + 16, i, low_bits(from[64 + i / 32 * 16 + 4 * row + a.i], 4 * a.half + 2 * a.quarter + a.upper, 1));
  }
}
void q6_k_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to + 208);
  for (int sub = 0; sub < 16; ++sub) to[192 + sub] = from[8 + scale_at(sub, row)];
  for (int i = 0; i < 256; ++i) {
    const At a(i % 32);
    const int quarter = i / 32 % 4;
    const int high = low_bits(from[72 + i / 32 * 32 + 4 * row + a.i + 16 * a.half], 4 * a.quarter + 2 * a.upper, 2);
    add_bits(to[i / 128 * 64 + quarter % 2 * 32 + i % 32], nibble_r4(from + 328 + i / 32 * 64, row, i % 32),
             quarter / 2 * 4);
    add_bits(to[128 + i / 128 * 32 + i % 32], high, 2 * quarter);
  }
}
void q8_k_r8(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int j = 0; j < 256; ++j) to[2 + j] = from[16 + 32 * (j / 4) + 4 * row + j % 4];
}
void q8_k_r16(const uint8_t* from, int row, uint8_t* to) {  // its bytes are 128 larger
  copy_half(from, row, to);
  for (int j = 0; j < 256; ++j) to[2 + j] = from[32 + 64 * (j / 4) + 4 * row + j % 4] ^ 0x80;
}
void iq4_xs_r8(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  unsigned upper = 0;
  for (int sub = 0; sub < 8; ++sub) {
    const int at = 8 * sub + row;
    put_nibble(to + 4, sub, lower_scale(from + 32, at));
    upper |= static_cast<unsigned>(upper_scale(from + 16, at)) << (2 * sub);
  }
  put_u16(to + 2, upper);
  for (int i = 0; i < 256; ++i) {
    const int byte = from[64 + i / 32 * 128 + 4 * row + i % 4 + i % 32 / 8 * 32];
    put_nibble_of_32(to + 8, i, low_bits(byte, i % 8 / 4 * 4, 4));
  }
}

// ---- grids ---------------------------------------------------------------------------------------------------------

// Converts four bytes of signs in Gray code, whose lowest bits are a scale, to the plain word of 4 x 7 signs and the
// scale.
uint32_t signs_and_scale(uint32_t word) {
  uint32_t out = 0;
  const uint32_t gray = word & 0xfefefefeu, signs = gray ^ gray >> 1;
  for (int i = 0; i < 4; ++i) {
    out |= (signs >> (8 * i) & 127u) << (7 * i);
    out |= (word >> (8 * i) & 1u) << (28 + i);
  }
  return out;
}
void iq2_xxs_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int sub = 0; sub < 8; ++sub) {
    std::memcpy(to + 2 + 8 * sub, from + 136 + 16 * sub + 4 * row, 4);
    put_u32(to + 6 + 8 * sub, signs_and_scale(load_u32(from + 8 + 16 * sub + 4 * row)));
  }
}
void iq3_xxs_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int sub = 0; sub < 8; ++sub) {
    std::memcpy(to + 2 + 8 * sub, from + 136 + 32 * sub + 8 * row, 8);
    put_u32(to + 66 + 4 * sub, signs_and_scale(load_u32(from + 8 + 16 * sub + 4 * row)));
  }
}
void iq2_xs_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int i = 0; i < 32; ++i) {
    const unsigned word = load_u16(from + 8 + 2 * (i / 4 * 16 + 4 * row + i % 4)), gray = word >> 9;
    put_u16(to + 2 + 2 * i, (word & 511u) | ((gray ^ gray << 1) & 127u) << 9);
  }
  for (int sub = 0; sub < 8; ++sub) to[66 + sub] = from[264 + 4 * sub + row];
}
void iq2_s_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int i = 0; i < 32; ++i) {
    const int at = i / 4 * 16 + 4 * row + i % 4;
    to[2 + i] = from[8 + at];
    to[34 + i] = from[168 + at];
  }
  for (int sub = 0; sub < 8; ++sub) {
    to[66 + sub] = from[136 + 4 * sub + row];
    to[74 + sub] = from[296 + 4 * sub + row];
  }
}
void iq3_s_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  for (int sub = 0; sub < 8; ++sub) {
    const int at = 4 * sub + row;
    to[66 + sub] = from[264 + at];
    put_nibble(to + 106, sub, low_bits(from[424 + at % 16], 4 * (at / 16), 4));
    for (int group = 0; group < 8; ++group) {
      to[2 + 8 * sub + group] = from[8 + 32 * sub + row + group % 4 * 8 + group / 4 * 4];
      for (int j = 0; j < 4; ++j) {
        const int sign = low_bits(from[296 + 16 * sub + 4 * row + j], group, 1);
        add_bits(to[74 + 4 * sub + group / 2], sign, group % 2 * 4 + j);
      }
    }
  }
}

// ---- codebooks -----------------------------------------------------------------------------------------------------

unsigned shift_bits(const uint8_t* extra, int row) {
  unsigned bits = 0;
  for (int sub = 0; sub < 16; ++sub) {
    bits |= static_cast<unsigned>(low_bits(extra[row + 4 * (sub % 2)], sub / 2, 1)) << sub;
  }
  return bits;
}
void iq2_k_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  put_u16(to + 2, shift_bits(from + 8, row));
  for (int sub = 0; sub < 16; ++sub) put_nibble(to + 4, sub, lower_scale(from + 16, scale_at(sub, row)));
  for (int i = 0; i < 256; ++i) put_two_bits(to + 12, i, two_bits_r4(from + 48 + i / 32 * 32, row, i % 32));
}
void iq3_k_r4(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  put_u16(to + 2, shift_bits(from + 8, row));
  for (int sub = 0; sub < 16; ++sub) {
    const int at = scale_at(sub, row);
    put_nibble(to + 6, sub, lower_scale(from + 24, at));
    add_bits(to[4 + sub / 8], low_bits(from[16 + at % 8], at / 8, 1), sub % 8);
  }
  for (int i = 0; i < 256; ++i) {
    put_two_bits(to + 14, i, two_bits_r4(from + 56 + i / 32 * 32, row, i % 32));
    put_plane(to + 78, i, low_bits(from[312 + i / 32 * 16 + 4 * row + i % 4], i % 32 / 4, 1));
  }
}
// d, shifts and scales of iq4_k and iq5_k.
void k_scales(const uint8_t* from, int row, uint8_t* to) {
  copy_half(from, row, to);
  put_u16(to + 2, shift_bits(from + 8, row));
  for (int sub = 0; sub < 16; ++sub) {
    const int at = scale_at(sub, row);
    put_nibble(to + 8, sub, lower_scale(from + 32, at));
    add_bits(to[4 + sub / 4], upper_scale(from + 16, at), sub % 4 * 2);
  }
}
// The fifth bit of value i in units of iq5_k and iq5_ks.
int fifth_bit(const uint8_t* q, int row, int i) {
  const At a(i % 32);
  return low_bits(q[i / 32 * 16 + 4 * row + a.i], 2 * a.half + 4 * a.quarter + a.upper, 1);
}
void iq4_k_r4(const uint8_t* from, int row, uint8_t* to) {
  k_scales(from, row, to);
  for (int i = 0; i < 256; ++i) put_nibble_of_32(to + 16, i, nibble_r4(from + 64 + i / 32 * 64, row, i % 32));
}
void iq5_k_r4(const uint8_t* from, int row, uint8_t* to) {
  k_scales(from, row, to);
  for (int i = 0; i < 256; ++i) {
    put_nibble_of_64(to + 16, i, nibble_r4(from + 64 + i / 32 * 64, row, i % 32));
    put_plane(to + 144, i, fifth_bit(from + 576, row, i));
  }
}
void iq4_ks_r4(const uint8_t* from, int row, uint8_t* to) {
  for (int sub = 0; sub < 8; ++sub) to[sub] = from[4 * sub + row];
  for (int i = 0; i < 256; ++i) put_nibble_of_32(to + 8, i, nibble_r4(from + 32 + i / 32 * 64, row, i % 32));
}
void iq5_ks_r4(const uint8_t* from, int row, uint8_t* to) {
  for (int sub = 0; sub < 8; ++sub) to[sub] = from[4 * sub + row];
  for (int i = 0; i < 256; ++i) {
    put_nibble_of_64(to + 8, i, nibble_r4(from + 32 + i / 32 * 64, row, i % 32));
    put_plane(to + 136, i, fifth_bit(from + 544, row, i));
  }
}

using TakeBlock = void (*)(const uint8_t* from, int row, uint8_t* to);

TakeBlock block_of(DType type) {
  switch (type) {
#define DYNO_INTERLEAVED_TYPE(name, ...) \
  case DType::name:                      \
    return name;
#include "core/weight_types.def"
    default:
      return nullptr;
  }
}

}  // namespace

void take_apart(DType type, const std::byte* unit, std::byte* rows, int64_t k) {
  const TakeBlock take = block_of(type);
  DYNO_CHECK(UnsupportedError, take != nullptr, "[gguf] type ", dtype_name(type), " is not interleaved");
  const DTypeInfo& info = dtype_info(type);
  const size_t row_size = row_bytes(info.plain, k);
  const auto n_rows = static_cast<size_t>(info.rows), block = static_cast<size_t>(info.block_bytes);
  const auto* from = reinterpret_cast<const uint8_t*>(unit) + n_rows * info.row_meta_bytes;
  for (size_t row = 0; row < n_rows; ++row) {
    auto* to = reinterpret_cast<uint8_t*>(rows) + row * row_size;
    std::memset(to, 0, row_size);
    std::memcpy(to, unit + row * info.row_meta_bytes, info.row_meta_bytes);
    to += info.row_meta_bytes;
    for (int64_t i = 0; i < k / info.block_elements; ++i) {
      const auto at = static_cast<size_t>(i);
      take(from + at * n_rows * block, static_cast<int>(row), to + at * block);
    }
  }
}

}  // namespace dyno
