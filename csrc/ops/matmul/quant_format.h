// Facts on each quantised type that the kernels, the x16 layout and the cost model share.
//
// Every type is affine per group of 16 or 32 values: w = s * (u - offset) - b, u an unsigned integer of at most 8 bits
// (codebook types look u up), s and b floats made from the header of the record. A record is the file's block: 32 or
// 256 values of k. In layout x16 a record holds 16 rows: a header (the same scales as in the file, one array of 16 per
// field) and then for each 32 k the bit planes of u, see unpack.h.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace dyno::ops {

// How scales stand in the header of an x16 record; [16] is one value a row.
enum class Header : uint8_t {
  d,        // f16 d[16]                                     s = d
  d_m,      // f16 d[16], f16 m[16]                          s = d, b = -m
  e8m0,     // u8 e[16]                                      s = 2^(e - 128): the codebook is in halves
  k_min32,  // f16 d[16], f16 dmin[16], u8 sc[8][16], u8 m[8][16]   s = d * sc, b = dmin * m     (6-bit fields widened)
  k_scale16,  // f16 d[16], s8 sc[16][16]                    s = d * sc
  k_min16,    // f16 d[16], f16 dmin[16], u8 scm[16][16]     s = d * (scm & 15), b = dmin * (scm >> 4)
  k_scale32,  // f16 d[16], s8 sc[8][16]                     s = d * sc
};

// Internal linkage: kernel sources of every instruction set include this.
static constexpr int header_bytes(Header h) {
  switch (h) {
    case Header::d:
      return 32;
    case Header::d_m:
      return 64;
    case Header::e8m0:
      return 16;
    case Header::k_min32:
      return 64 + 256;
    case Header::k_scale16:
      return 32 + 256;
    case Header::k_min16:
      return 64 + 256;
    case Header::k_scale32:
      return 32 + 128;
  }
  return 0;
}

enum class Codebook : uint8_t { none, iq4nl, mxfp4 };

struct QuantFormat {
  Header header;
  int bits;    // of u before the codebook: 2, 3, 4, 5, 6 or 8
  int group;   // values under one scale
  int offset;  // subtracted from u (after the codebook)
  bool has_min;
  Codebook codebook;
  int block;        // values in a block of the file, and in a record
  int block_bytes;  // in the file
};

static constexpr int planes_bytes(const QuantFormat& f) { return 64 * f.bits; }  // 16 rows x 32 k
static constexpr int record_bytes(const QuantFormat& f) {
  return header_bytes(f.header) + f.block / 32 * planes_bytes(f);
}

template <DType T>
inline constexpr QuantFormat kFormat = {};
template <>
inline constexpr QuantFormat kFormat<DType::q4_0> = {Header::d, 4, 32, 8, false, Codebook::none, 32, 18};
template <>
inline constexpr QuantFormat kFormat<DType::q4_1> = {Header::d_m, 4, 32, 0, true, Codebook::none, 32, 20};
template <>
inline constexpr QuantFormat kFormat<DType::q5_0> = {Header::d, 5, 32, 16, false, Codebook::none, 32, 22};
template <>
inline constexpr QuantFormat kFormat<DType::q5_1> = {Header::d_m, 5, 32, 0, true, Codebook::none, 32, 24};
template <>
inline constexpr QuantFormat kFormat<DType::q8_0> = {Header::d, 8, 32, 128, false, Codebook::none, 32, 34};
template <>
inline constexpr QuantFormat kFormat<DType::q2_k> = {Header::k_min16, 2, 16, 0, true, Codebook::none, 256, 84};
template <>
inline constexpr QuantFormat kFormat<DType::q3_k> = {Header::k_scale16, 3, 16, 4, false, Codebook::none, 256, 110};
template <>
inline constexpr QuantFormat kFormat<DType::q4_k> = {Header::k_min32, 4, 32, 0, true, Codebook::none, 256, 144};
template <>
inline constexpr QuantFormat kFormat<DType::q5_k> = {Header::k_min32, 5, 32, 0, true, Codebook::none, 256, 176};
template <>
inline constexpr QuantFormat kFormat<DType::q6_k> = {Header::k_scale16, 6, 16, 32, false, Codebook::none, 256, 210};
template <>
inline constexpr QuantFormat kFormat<DType::iq4_nl> = {Header::d, 4, 32, 128, false, Codebook::iq4nl, 32, 18};
template <>
inline constexpr QuantFormat kFormat<DType::iq4_xs> = {Header::k_scale32, 4, 32, 128, false, Codebook::iq4nl, 256, 136};
template <>
inline constexpr QuantFormat kFormat<DType::mxfp4> = {Header::e8m0, 4, 32, 128, false, Codebook::mxfp4, 32, 17};

// Values of the codebooks, plus 128 so that they are unsigned.
alignas(16) inline constexpr uint8_t kIq4NlCodes[16] = {128 - 127, 128 - 104, 128 - 83, 128 - 65, 128 - 49, 128 - 35,
                                                        128 - 22,  128 - 10,  128 + 1,  128 + 13, 128 + 25, 128 + 38,
                                                        128 + 53,  128 + 69,  128 + 89, 128 + 113};
alignas(16) inline constexpr uint8_t kMxfp4Codes[16] = {128,     128 + 1,  128 + 2, 128 + 3, 128 + 4, 128 + 6,
                                                        128 + 8, 128 + 12, 128,     128 - 1, 128 - 2, 128 - 3,
                                                        128 - 4, 128 - 6,  128 - 8, 128 - 12};

}  // namespace dyno::ops

// DYNO_QUANT_TYPES(X): X(type) for every quantised type that has kernels.
#define DYNO_QUANT_TYPES(X) \
  X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(iq4_xs) X(mxfp4)
