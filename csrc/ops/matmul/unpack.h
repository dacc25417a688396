// From stored weights to tiles: 16 rows x 32 k of unsigned bytes (signed with kSignedBytes, where the type has 8 bits)
// as 8 vectors of 16 rows x 4 k, and scales per row. The only code that knows how types are stored. Kernel sources
// only.
//
// Bit planes of layout x16, for each 32 k, in this order; "step" j is the vector of k = 4j .. 4j+3:
//   low 4 bits (4, 5, 6 bit types)  4 vectors: vector j has step j in the low and step j + 4 in the high nibble
//   low 2 bits (2, 3 bit types) and bits 4-5 (6 bit types)  2 vectors: vector p has step 4p + i at bits 2i, 2i+1
//   top bit (3, 5 bit types)        1 vector: step j at bit j
//   8 bits                          8 vectors, one a step, plus 128
#pragma once

#include "ops/matmul/quant_format.h"
#include "ops/matmul/simd.h"
#include "ops/matmul/unpack_row.h"
#include "ops/op.h"

namespace DYNO_KERNEL_NAMESPACE {

// 16 rows of a weight matrix; in layout plain only `rows` of them exist and the last one stands in for the others.
struct TileRef {
  const uint8_t* base = nullptr;
  int64_t row_bytes = 0;  // plain
  int rows = 16;
};

template <DType T>
inline constexpr int kHeaderBytes = header_bytes(kFormat<T>.header);
template <DType T>
inline constexpr int kPlanesBytes = planes_bytes(kFormat<T>);
template <DType T>
inline constexpr int kRecordBytes = record_bytes(kFormat<T>);
// What is subtracted from the integers of a tile.
template <DType T>
inline constexpr int kTileOffset = kBytesSigned<T> ? 0 : kFormat<T>.offset;
// Steps between widenings, see Dot.
template <DType T>
inline constexpr int kWiden = !kSignedBytes          ? 8
                              : kBytesSigned<T>      ? 1
                              : kFormat<T>.bits <= 4 ? 8
                              : kFormat<T>.bits == 5 ? 4
                                                     : 2;

template <DType T>
inline B from_codes(B index) {
  constexpr bool kMx = kFormat<T>.codebook == Codebook::mxfp4;
  const B codes = b_lut(lut_load(kMx ? kMxfp4Codes : kIq4NlCodes), index);
  if constexpr (kBytesSigned<T>) return b_xor(codes, b_set1(0x80));
  return codes;
}

// ---- x16 ----

template <int kStepIndex>
inline B top_bit(B plane, B mask_at_4) {
  // Moves bit kStepIndex of every byte to bit 4.
  if constexpr (kStepIndex <= 4) {
    return b_and(b_shl<4 - kStepIndex>(plane), mask_at_4);
  } else {
    return b_and(b_shr<kStepIndex - 4>(plane), mask_at_4);
  }
}

template <DType T>
DYNO_OUTLINE inline void load_planes(const uint8_t* p, B w[8]) {
  constexpr QuantFormat f = kFormat<T>;
  if constexpr (f.bits == 8) {
    for (int j = 0; j < 8; ++j) w[j] = b_load(p + 64 * j);
    if constexpr (kBytesSigned<T>) {
      for (int j = 0; j < 8; ++j) w[j] = b_xor(w[j], b_set1(0x80));
    }
  } else if constexpr (f.bits >= 4) {
    const B low = b_set1(15);
    for (int j = 0; j < 4; ++j) {
      const B both = b_load(p + 64 * j);
      w[j] = b_and(both, low);
      w[j + 4] = b_and(b_shr<4>(both), low);
    }
    if constexpr (f.codebook != Codebook::none) {
      for (int j = 0; j < 8; ++j) w[j] = from_codes<T>(w[j]);
    } else if constexpr (f.bits == 5) {
      const B h = b_load(p + 256), m = b_set1(16);
      w[0] = b_or(w[0], top_bit<0>(h, m));
      w[1] = b_or(w[1], top_bit<1>(h, m));
      w[2] = b_or(w[2], top_bit<2>(h, m));
      w[3] = b_or(w[3], top_bit<3>(h, m));
      w[4] = b_or(w[4], top_bit<4>(h, m));
      w[5] = b_or(w[5], top_bit<5>(h, m));
      w[6] = b_or(w[6], top_bit<6>(h, m));
      w[7] = b_or(w[7], top_bit<7>(h, m));
    } else if constexpr (f.bits == 6) {
      const B m = b_set1(0x30);
      for (int half = 0; half < 2; ++half) {
        const B h = b_load(p + 256 + 64 * half);
        B* out = w + 4 * half;
        out[0] = b_or(out[0], b_and(b_shl<4>(h), m));
        out[1] = b_or(out[1], b_and(b_shl<2>(h), m));
        out[2] = b_or(out[2], b_and(h, m));
        out[3] = b_or(out[3], b_and(b_shr<2>(h), m));
      }
    }
  } else {
    const B m = b_set1(3);
    for (int half = 0; half < 2; ++half) {
      const B q = b_load(p + 64 * half);
      B* out = w + 4 * half;
      out[0] = b_and(q, m);
      out[1] = b_and(b_shr<2>(q), m);
      out[2] = b_and(b_shr<4>(q), m);
      out[3] = b_and(b_shr<6>(q), m);
    }
    if constexpr (f.bits == 3) {
      const B h = b_load(p + 128), m4 = b_set1(4);
      w[0] = b_or(w[0], b_and(b_shl<2>(h), m4));
      w[1] = b_or(w[1], b_and(b_shl<1>(h), m4));
      w[2] = b_or(w[2], b_and(h, m4));
      w[3] = b_or(w[3], b_and(b_shr<1>(h), m4));
      w[4] = b_or(w[4], b_and(b_shr<2>(h), m4));
      w[5] = b_or(w[5], b_and(b_shr<3>(h), m4));
      w[6] = b_or(w[6], b_and(b_shr<4>(h), m4));
      w[7] = b_or(w[7], b_and(b_shr<5>(h), m4));
    }
  }
}

// The inverse, for repacking: `w` as load_planes gives it.
template <DType T>
DYNO_OUTLINE inline void store_planes(uint8_t* p, const B w_in[8]) {
  constexpr QuantFormat f = kFormat<T>;
  static_assert(f.bits != 0);
  alignas(64) uint8_t w[8][64];
  for (int j = 0; j < 8; ++j) b_store(w[j], w_in[j]);
  if constexpr (f.bits == 8) {
    for (int j = 0; j < 8; ++j) {
      for (int i = 0; i < 64; ++i) p[64 * j + i] = static_cast<uint8_t>(w[j][i] ^ (kBytesSigned<T> ? 0x80 : 0));
    }
  } else {
    if constexpr (f.bits >= 4) {
      for (int j = 0; j < 4; ++j) {
        for (int i = 0; i < 64; ++i) p[64 * j + i] = static_cast<uint8_t>((w[j][i] & 15) | w[j + 4][i] << 4);
      }
      p += 256;
    }
    if constexpr (f.bits == 6 || f.bits <= 3) {
      constexpr int kFrom = f.bits == 6 ? 4 : 0;
      for (int half = 0; half < 2; ++half) {
        const uint8_t(*v)[64] = w + 4 * half;
        for (int i = 0; i < 64; ++i) {
          p[i] = static_cast<uint8_t>((v[0][i] >> kFrom & 3) | (v[1][i] >> kFrom & 3) << 2 |
                                      (v[2][i] >> kFrom & 3) << 4 | (v[3][i] >> kFrom & 3) << 6);
        }
        p += 64;
      }
    }
    if constexpr (f.bits == 3 || f.bits == 5) {
      constexpr int kFrom = f.bits == 3 ? 2 : 4;
      for (int i = 0; i < 64; ++i) {
        int x = 0;
        for (int j = 0; j < 8; ++j) x |= (w[j][i] >> kFrom & 1) << j;
        p[i] = static_cast<uint8_t>(x);
      }
    }
  }
}

// Scales of the 32 k number `sub` of a record: one pair for groups of 32, two for groups of 16.
template <DType T>
DYNO_OUTLINE inline void load_scales(const uint8_t* h, int sub, F s[2], F b[2]) {
  constexpr QuantFormat f = kFormat<T>;
  if constexpr (f.header == Header::d) {
    s[0] = f_from_f16(h);
  } else if constexpr (f.header == Header::d_m) {
    s[0] = f_from_f16(h);
    b[0] = f_sub(f_zero(), f_from_f16(h + 32));
  } else if constexpr (f.header == Header::e8m0) {
    s[0] = f_from_e8m0_half(h);
  } else if constexpr (f.header == Header::k_min32) {
    s[0] = f_mul(f_from_f16(h), f_from_u8(h + 64 + 16 * sub));
    b[0] = f_mul(f_from_f16(h + 32), f_from_u8(h + 192 + 16 * sub));
  } else if constexpr (f.header == Header::k_scale16) {
    const F d = f_from_f16(h);
    s[0] = f_mul(d, f_from_s8(h + 32 + 32 * sub));
    s[1] = f_mul(d, f_from_s8(h + 48 + 32 * sub));
  } else if constexpr (f.header == Header::k_min16) {
    const F d = f_from_f16(h), dmin = f_from_f16(h + 32);
    for (int i = 0; i < 2; ++i) {
      s[i] = f_mul(d, f_from_low_nibble(h + 64 + 32 * sub + 16 * i));
      b[i] = f_mul(dmin, f_from_high_nibble(h + 64 + 32 * sub + 16 * i));
    }
  } else {
    s[0] = f_mul(f_from_f16(h), f_from_s8(h + 32 + 16 * sub));
  }
}

// ---- plain ----

// The x16 header of one row's block, `row` of 16.
template <DType T>
DYNO_OUTLINE inline void pack_header(const uint8_t* block, int row, uint8_t* h) {
  constexpr QuantFormat f = kFormat<T>;
  uint8_t* const d = h + 2 * row;
  if constexpr (f.header == Header::d) {
    std::memcpy(d, block, 2);
  } else if constexpr (f.header == Header::d_m) {
    std::memcpy(d, block, 2);
    std::memcpy(d + 32, block + 2, 2);
  } else if constexpr (f.header == Header::e8m0) {
    h[row] = block[0];
  } else if constexpr (f.header == Header::k_min32) {
    std::memcpy(d, block, 2);
    std::memcpy(d + 32, block + 2, 2);
    // Twelve bytes hold eight 6-bit scales and eight 6-bit minima: 0-3 in bytes 0-3 and 4-7, 4-7 in the nibbles of
    // bytes 8-11 with their top bits in the top bits of bytes 0-7.
    const uint8_t* q = block + 4;
    uint8_t* sc = h + 64 + row;
    uint8_t* m = h + 192 + row;
    for (int j = 0; j < 4; ++j) {
      sc[16 * j] = q[j] & 63;
      m[16 * j] = q[j + 4] & 63;
      sc[16 * (j + 4)] = static_cast<uint8_t>((q[j + 8] & 15) | q[j] >> 6 << 4);
      m[16 * (j + 4)] = static_cast<uint8_t>(q[j + 8] >> 4 | q[j + 4] >> 6 << 4);
    }
  } else if constexpr (T == DType::q6_k) {
    std::memcpy(d, block + 208, 2);
    for (int j = 0; j < 16; ++j) h[32 + 16 * j + row] = block[192 + j];
  } else if constexpr (T == DType::q3_k) {
    std::memcpy(d, block + 108, 2);
    // Sixteen 6-bit scales less 32: low nibbles in bytes 0-7 (0-7 low, 8-15 high), top bits in bytes 8-11.
    const uint8_t* q = block + 96;
    for (int j = 0; j < 16; ++j) {
      const int low = q[j & 7] >> (j < 8 ? 0 : 4) & 15;
      const int high = q[8 + (j & 3)] >> (2 * (j >> 2)) & 3;
      h[32 + 16 * j + row] = static_cast<uint8_t>((low | high << 4) - 32);
    }
  } else if constexpr (T == DType::q2_k) {
    std::memcpy(d, block + 80, 2);
    std::memcpy(d + 32, block + 82, 2);
    for (int j = 0; j < 16; ++j) h[64 + 16 * j + row] = block[j];
  } else {
    static_assert(T == DType::iq4_xs);
    std::memcpy(d, block, 2);
    uint16_t high;
    std::memcpy(&high, block + 2, 2);
    for (int j = 0; j < 8; ++j) {
      const int low = block[4 + j / 2] >> (4 * (j & 1)) & 15;
      h[32 + 16 * j + row] = static_cast<uint8_t>((low | (high >> (2 * j) & 3) << 4) - 32);
    }
  }
}

// ---- the two layouts behind one interface ----

template <DType T, Layout L>
class TileSource;

template <DType T>
class TileSource<T, Layout::x16> {
 public:
  explicit TileSource(const TileRef& tile) : base_(tile.base) {}
  void seek(int64_t record) { record_ = base_ + record * kRecordBytes<T>; }
  void load(int sub, B w[8]) const { load_planes<T>(record_ + kHeaderBytes<T> + sub * kPlanesBytes<T>, w); }
  void scales(int sub, F s[2], F b[2]) const { load_scales<T>(record_, sub, s, b); }
  const uint8_t* record() const { return record_; }

 private:
  const uint8_t* base_;
  const uint8_t* record_ = nullptr;
};

template <DType T>
class TileSource<T, Layout::plain> {
 public:
  explicit TileSource(const TileRef& tile) {
    for (int r = 0; r < 16; ++r) {
      base_[r] = tile.base + (r < tile.rows ? r : tile.rows - 1) * tile.row_bytes;
    }
  }
  void seek(int64_t record) {
    for (int r = 0; r < 16; ++r) {
      block_[r] = base_[r] + record * kFormat<T>.block_bytes;
      pack_header<T>(block_[r], r, header_);
    }
  }
  void load(int sub, B w[8]) const {
    load_indices(sub, w);
    if constexpr (kFormat<T>.codebook != Codebook::none) {
      for (int j = 0; j < 8; ++j) w[j] = from_codes<T>(w[j]);
    }
  }
  // Without the codebook: what store_planes() takes.
  void load_indices(int sub, B w[8]) const {
    Row32 rows[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) rows[r] = unpack_row<T>(block_[r], sub);
    transpose_rows(rows, w);
  }
  void scales(int sub, F s[2], F b[2]) const { load_scales<T>(header_, sub, s, b); }
  const uint8_t* header() const { return header_; }

 private:
  const uint8_t* base_[16];
  const uint8_t* block_[16];
  alignas(64) uint8_t header_[kHeaderBytes<T>];
};

}  // namespace DYNO_KERNEL_NAMESPACE
