// How the values of each quantised type are computed from its codes and scales. Dequantisation, layout x16 and the CPU
// kernels are generated from this trait, which itself is generated from core/weight_types.def.
//
// Included by kernel sources of every instruction set: everything has internal linkage (see quant_blocks.h).
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "gguf/codebooks.h"

namespace dyno {

// How scales are stored in the header of an x16 record; [16] is one value per row.
enum class Header : uint8_t {
  d,        // f16 d[16]                                     s = d
  d_m,      // f16 d[16], f16 m[16]                          s = d, b = -m
  e8m0,     // u8 e[16]                                      s = 2^(e - 128): the codebook is in halves
  k_min32,  // f16 d[16], f16 dmin[16], u8 sc[8][16], u8 m[8][16]   s = d * sc, b = dmin * m     (6-bit fields widened)
  k_scale16,  // f16 d[16], s8 sc[16][16]                    s = d * sc
  k_min16,    // f16 d[16], f16 dmin[16], u8 scm[16][16]     s = d * (scm & 15), b = dmin * (scm >> 4)
  k_scale32,  // f16 d[16], s8 sc[8][16]                     s = d * sc
  f_scale32,  // f32 d[16], s8 sc[8][16]                     s = d * sc
  d_float,    // f32 d[16]                                   s = d
  halves16,   // f16 s[block / 16][16]
};

struct WeightFormat {
  Header header = Header::d;
  int bits = 0;    // of u, before the codebook: 2, 3, 4, 5, 6 or 8
  int group = 32;  // values under one scale: 16 or 32
  int offset = 0;  // subtracted from u, for types without a codebook
  bool has_min = false;
  int block = 0;        // values in a block of the file, and in a record
  bool lookup = false;  // u is an index into a codebook
  bool scaled = false;  // the codebook has a unit, by which scales are multiplied
  int every = 0;        // number of values that share a shift bit: 8, 16 or 32; 0 for types without shifts

  // Types with equal formats share their kernels.
  friend constexpr bool operator==(const WeightFormat&, const WeightFormat&) = default;
};

template <DType T>
inline constexpr WeightFormat kFormat = {};
template <DType T>
inline constexpr const Codebook* kCodebook = &codebook::none;
template <DType T>
inline constexpr int kShift = 0;
template <DType T>
inline constexpr int kBlockBytes = 0;
template <DType T>
inline constexpr int kMetaBytes = 0;

#define DYNO_QUANT_TYPE(name, id, block, bytes, header, bits, group, offset, min, book)                             \
  template <>                                                                                                       \
  inline constexpr WeightFormat kFormat<DType::name> = {Header::header,           bits,  group, offset, min, block, \
                                                        codebook::book.size != 0, false, 0};                        \
  template <>                                                                                                       \
  inline constexpr const Codebook* kCodebook<DType::name> = &codebook::book;                                        \
  template <>                                                                                                       \
  inline constexpr int kBlockBytes<DType::name> = bytes;
#define DYNO_CODED_TYPE(name, id, block, bytes, meta, header, bits, group, offset, book, shift, every)              \
  template <>                                                                                                       \
  inline constexpr WeightFormat kFormat<DType::name> =                                                              \
      {                                                                                                             \
          Header::header, bits, group, offset, false, block, codebook::book.size != 0, codebook::book.unit != 1.0f, \
          every};                                                                                                   \
  template <>                                                                                                       \
  inline constexpr const Codebook* kCodebook<DType::name> = &codebook::book;                                        \
  template <>                                                                                                       \
  inline constexpr int kShift<DType::name> = shift;                                                                 \
  template <>                                                                                                       \
  inline constexpr int kBlockBytes<DType::name> = bytes;                                                            \
  template <>                                                                                                       \
  inline constexpr int kMetaBytes<DType::name> = meta;
#include "core/weight_types.def"

}  // namespace dyno
