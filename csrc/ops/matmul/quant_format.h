// Properties of each quantised type that the kernels and layout x16 share.
//
// Every type is affine per group of 16 or 32 values: w = s * (u - offset) - b. u is an unsigned integer of at most 8
// bits (codebook types look u up); s and b are floats from the header of the record. A record corresponds to the file's
// block: 32 to 256 values of k. In layout x16 a record has 16 rows: a header (the scales, one array of 16 per field);
// for types with shifts the shift bits of the rows, one word for each run of `every` values; and then for each 32 k the
// bit planes of u, see unpack.h. The formats themselves are in gguf/weight_format.h.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "gguf/weight_format.h"

namespace dyno::ops {

// Internal linkage, because kernel sources of every instruction set include this.
static constexpr int header_bytes(const WeightFormat& f) {
  switch (f.header) {
    case Header::d:
      return 32;
    case Header::d_m:
      return 64;
    case Header::e8m0:
      return 16;
    case Header::k_min32:
      return 64 + 256;
    case Header::k_scale16:
      return 32 + f.block;
    case Header::k_min16:
      return 64 + 256;
    case Header::k_scale32:
      return 32 + f.block / 2;
    case Header::f_scale32:
      return 64 + f.block / 2;
    case Header::d_float:
      return 64;
    case Header::halves16:
      return f.block / 16 * 32;
  }
  return 0;
}
static constexpr int shift_bytes(const WeightFormat& f) { return f.every == 0 ? 0 : f.block / f.every * 2; }
static constexpr int planes_bytes(const WeightFormat& f) { return 64 * f.bits; }  // 16 rows x 32 k
static constexpr int record_bytes(const WeightFormat& f) {
  return header_bytes(f) + shift_bytes(f) + f.block / 32 * planes_bytes(f);
}

// A codebook for lookups in kernels: unsigned bytes, value + offset.
struct Codes {
  alignas(16) uint8_t bytes[32] = {};
  int offset = 0;
  uint32_t shift = 0;  // added to each byte if a row's shift bit is set
  float unit = 1.0f;
};

// Largest code minus smallest code, including shifts.
static constexpr int code_range(const Codebook& book, int shift) {
  int least = book.values[0], most = book.values[0];
  for (int i = 1; i < book.size; ++i) {
    least = book.values[i] < least ? book.values[i] : least;
    most = book.values[i] > most ? book.values[i] : most;
  }
  return most - least + shift;
}

// 2 * 127 * 129 still fits int16: up to this range AVX2 multiplies unsigned codes.
inline constexpr int kMaxUnsignedRange = 129;

static constexpr Codes codes_of(const Codebook& book, int shift) {
  Codes c;
  int least = book.values[0];
  for (int i = 1; i < book.size; ++i) least = book.values[i] < least ? book.values[i] : least;
  c.offset = code_range(book, shift) <= kMaxUnsignedRange ? -least : 128;
  // If there are fewer codes, tables of 16 entries repeat them; indices never exceed the table.
  for (int i = 0; i < 32 && book.size > 0; ++i) {
    c.bytes[i] = static_cast<uint8_t>(book.values[i % book.size] + c.offset);
  }
  c.shift = static_cast<uint32_t>(shift) * 0x01010101u;
  c.unit = book.unit;
  return c;
}

template <DType T>
inline constexpr Codes kCodes = codes_of(*kCodebook<T>, kShift<T>);

}  // namespace dyno::ops
