// Unpacks stored weights to tiles: 16 rows x 32 k of unsigned bytes (signed with kSignedBytes for types of 8 bits) as 8
// vectors of 16 rows x 4 k, and scales per row. Kernel sources only. Only gguf/decode.h knows the file layout of coded
// types.
//
// Bit planes of layout x16, for each 32 k, in this order; "step" j is the vector of k = 4j .. 4j+3:
//   low 4 bits (4, 5, 6 bit types)  4 vectors: vector j has step j in the low and step j + 4 in the high nibble
//   low 2 bits (2, 3 bit types) and bits 4-5 (6 bit types)  2 vectors: vector p has step 4p + i at bits 2i, 2i+1
//   top bit (3, 5 bit types)        1 vector: step j at bit j
//   8 bits                          8 vectors, one per step, plus 128
#pragma once

#include "ops/matmul/quant_format.h"
#include "ops/matmul/simd.h"
#include "ops/matmul/unpack_row.h"
#include "ops/op.h"

namespace DYNO_KERNEL_NAMESPACE {

// 16 rows of a weight matrix. In layout plain, only `rows` of them exist, and the last one replaces the others.
struct TileRef {
  const uint8_t* base = nullptr;
  int64_t row_bytes = 0;  // plain
  int rows = 16;
};

// The properties of a type's tiles that determine the code.
struct TileFormat {
  WeightFormat format;
  int widen = 8;  // steps between widenings, see Dot; 0 for signed bytes

  friend constexpr bool operator==(const TileFormat&, const TileFormat&) = default;
};

// Number of Dot steps whose sums fit int16 for unsigned integers up to `most`.
constexpr int steps_of(int most) { return most <= 16 ? 8 : most <= 32 ? 4 : most <= 64 ? 2 : 1; }

template <DType T>
constexpr TileFormat tile_format() {
  constexpr WeightFormat f = kFormat<T>;
  if (!kSignedBytes) return {f, 8};
  if (kBytesSigned<T>) return {f, 0};
  return {f, f.lookup ? steps_of(code_range(*kCodebook<T>, kShift<T>)) : steps_of((1 << f.bits) - 1)};
}

// Properties of a type that kernels need and that types of one format do not share.
inline const Codes& codes_of_type(DType type) {
  static constexpr Codes kNone = {};
  switch (type) {
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return kCodes<DType::name>;
#define DYNO_CODED_TYPE(name, ...) \
  case DType::name:                \
    return kCodes<DType::name>;
#include "core/weight_types.def"
    default:
      return kNone;
  }
}

// The byte values of indices.
template <TileFormat kTile>
class Lookup {
 public:
  explicit Lookup(const Codes& codes) : low_(lut_load(codes.bytes)), high_(lut_load(codes.bytes + 16)) {}
  B operator()(B index) const {
    B bytes;
    if constexpr (kTile.format.bits == 5) {
      bytes = b_lut32(low_, high_, index);
    } else {
      bytes = b_lut(low_, index);
    }
    return bytes;
  }

 private:
  Lut low_, high_;
};

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

template <TileFormat kTile>
DYNO_OUTLINE inline void load_planes(const uint8_t* p, B w[8]) {
  constexpr WeightFormat f = kTile.format;
  if constexpr (f.bits == 8) {
    for (int j = 0; j < 8; ++j) w[j] = b_load(p + 64 * j);
    if constexpr (kTile.widen == 0) {
      for (int j = 0; j < 8; ++j) w[j] = b_xor(w[j], b_set1(0x80));
    }
  } else if constexpr (f.bits >= 4) {
    const B low = b_set1(15);
    for (int j = 0; j < 4; ++j) {
      const B both = b_load(p + 64 * j);
      w[j] = b_and(both, low);
      w[j + 4] = b_and(b_shr<4>(both), low);
    }
    if constexpr (f.bits == 5) {
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

// The inverse, for repacking: `w` in the form of load_planes().
template <TileFormat kTile>
DYNO_OUTLINE inline void store_planes(uint8_t* p, const B w_in[8]) {
  constexpr WeightFormat f = kTile.format;
  static_assert(f.bits != 0);
  alignas(64) uint8_t w[8][64];
  for (int j = 0; j < 8; ++j) b_store(w[j], w_in[j]);
  if constexpr (f.bits == 8) {
    for (int j = 0; j < 8; ++j) {
      for (int i = 0; i < 64; ++i) p[64 * j + i] = static_cast<uint8_t>(w[j][i] ^ (kTile.widen == 0 ? 0x80 : 0));
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

// Scales of group number `sub` of 32 k in a record: one pair for groups of 32, two for groups of 16.
template <WeightFormat f>
DYNO_OUTLINE inline void load_scales(const uint8_t* h, int sub, F s[2], F b[2]) {
  if constexpr (f.header == Header::d) {
    s[0] = f_from_f16(h);
  } else if constexpr (f.header == Header::d_float) {
    s[0] = f_load(reinterpret_cast<const float*>(h));
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
  } else if constexpr (f.header == Header::halves16) {
    s[0] = f_from_f16(h + 64 * sub);
    s[1] = f_from_f16(h + 64 * sub + 32);
  } else if constexpr (f.header == Header::f_scale32) {
    s[0] = f_mul(f_load(reinterpret_cast<const float*>(h)), f_from_s8(h + 64 + 16 * sub));
  } else {
    s[0] = f_mul(f_from_f16(h), f_from_s8(h + 32 + 16 * sub));
  }
}

// Adds what the rows' shift bits say to the 32 k number `sub` of a record; `bits` are those of the record.
template <WeightFormat f>
inline void add_shifts(const uint8_t* bits, int sub, uint32_t bytes, B w[8]) {
  constexpr int kSteps = f.every / 4;  // steps under one shift bit
  for (int run = 0; run < 8 / kSteps; ++run) {
    uint16_t rows;
    std::memcpy(&rows, bits + 2 * (sub * (8 / kSteps) + run), 2);
    const B add = b_rows(rows, bytes);
    for (int j = run * kSteps; j < (run + 1) * kSteps; ++j) w[j] = b_add(w[j], add);
  }
}

// ---- plain ----

// The x16 header of one row's block; `row` of 16.
template <DType T>
DYNO_OUTLINE inline void pack_header(const uint8_t* block, int row, uint8_t* h) {
  constexpr WeightFormat f = kFormat<T>;
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
    // Twelve bytes have eight 6-bit scales and eight 6-bit minima: number 0-3 in bytes 0-3 and 4-7; number 4-7 in the
    // nibbles of bytes 8-11, with their top bits in the top bits of bytes 0-7.
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
    // Sixteen 6-bit scales minus 32: low nibbles in bytes 0-7 (0-7 low, 8-15 high), top bits in bytes 8-11.
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
//
// The integers of a tile minus offset() are their values.

template <TileFormat kTile>
class X16Source {
 public:
  static constexpr TileFormat tile = kTile;
  static constexpr WeightFormat format = kTile.format;
  static constexpr int header = header_bytes(format) + shift_bytes(format);
  static constexpr int planes = planes_bytes(format);
  static constexpr int bytes = record_bytes(format);

  X16Source(const TileRef& tile_ref, DType type) : base_(tile_ref.base), codes_(codes_of_type(type)), lookup_(codes_) {}
  void seek(int64_t record) { record_ = base_ + record * bytes; }
  void load(int sub, B w[8]) const {
    load_planes<kTile>(record_ + header + sub * planes, w);
    if constexpr (format.lookup) {
      for (int j = 0; j < 8; ++j) w[j] = lookup_(w[j]);
      if constexpr (format.every != 0) {
        add_shifts<format>(record_ + header_bytes(format), sub, codes_.shift, w);
      }
      if constexpr (kTile.widen == 0) {
        for (int j = 0; j < 8; ++j) w[j] = b_xor(w[j], b_set1(0x80));
      }
    }
  }
  void scales(int sub, F s[2], F b[2]) const {
    load_scales<format>(record_, sub, s, b);
    if constexpr (format.scaled) {
      s[0] = f_mul(s[0], f_set1(codes_.unit));
      if constexpr (format.group == 16) s[1] = f_mul(s[1], f_set1(codes_.unit));
    }
  }
  int offset() const { return kTile.widen == 0 ? 0 : format.lookup ? codes_.offset : format.offset; }
  const uint8_t* record() const { return record_; }

 private:
  const uint8_t* base_;
  const uint8_t* record_ = nullptr;
  const Codes& codes_;
  Lookup<kTile> lookup_;
};

template <DType T>
class PlainSource {
 public:
  static constexpr TileFormat tile = tile_format<T>();
  static constexpr WeightFormat format = tile.format;

  PlainSource(const TileRef& tile_ref, DType) : lookup_(kCodes<T>) {
    for (int r = 0; r < 16; ++r) {
      base_[r] = tile_ref.base + (r < tile_ref.rows ? r : tile_ref.rows - 1) * tile_ref.row_bytes;
    }
  }
  void seek(int64_t record) {
    for (int r = 0; r < 16; ++r) {
      block_[r] = base_[r] + record * kBlockBytes<T>;
      pack_header<T>(block_[r], r, header_);
    }
  }
  void load(int sub, B w[8]) const {
    load_indices(sub, w);
    if constexpr (format.lookup) {
      for (int j = 0; j < 8; ++j) w[j] = lookup_(w[j]);
      if constexpr (tile.widen == 0) {
        for (int j = 0; j < 8; ++j) w[j] = b_xor(w[j], b_set1(0x80));
      }
    }
  }
  // Without the codebook lookup, as store_planes() needs it.
  void load_indices(int sub, B w[8]) const {
    Row32 rows[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) rows[r] = unpack_row<T>(block_[r], sub);
    transpose_rows(rows, w);
  }
  void scales(int sub, F s[2], F b[2]) const { load_scales<format>(header_, sub, s, b); }
  int offset() const { return tile.widen == 0 ? 0 : format.lookup ? kCodes<T>.offset : format.offset; }
  const uint8_t* header() const { return header_; }

 private:
  const uint8_t* base_[16];
  const uint8_t* block_[16];
  Lookup<tile> lookup_;
  alignas(64) uint8_t header_[header_bytes(format)];
};

// The source of a type in a layout; coded types are read in layout x16 only.
template <DType T, Layout L>
struct SourceOf {
  using Type = X16Source<tile_format<T>()>;
};
template <DType T>
struct SourceOf<T, Layout::plain> {
  using Type = PlainSource<T>;
};
template <DType T, Layout L>
using TileSource = typename SourceOf<T, L>::Type;

}  // namespace DYNO_KERNEL_NAMESPACE
