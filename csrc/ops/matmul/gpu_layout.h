// Layout::gpu: weights in the order of tensor core fragments and 16-byte loads. The bits are the same as in the file.
//
// A matrix [n, k] is cut into stripes of 16 rows (n padded up) and tiles of 64 k (k padded up); pads are zero weights.
// A stripe is contiguous along k, so a warp that walks one stripe reads one stream:
//
//   types with 32-element blocks, f16, bf16:   tile 0 | tile 1 | …          tile = codes, then scales
//   types with 256-element super-blocks:       super 0 | super 1 | …        super = 4 times (codes, then sub-block
//                                                                           scales), then d (and dmin) of the 256
//
// Codes. With lane = 4·g + t (g < 8, t < 4), a 16×16 step s (s < 4) of a tile is the A operand of mma.m16n8k16, whose
// register j (j < 4) holds for each lane two neighbours of k:
//   row g + 8·(j & 1), k = 16·s + 2·t + 8·(j >> 1) and that + 1       ("pair j, low and high element")
// f16, bf16: the 4 registers of step s, 16 bytes a lane: byte 512·s + 16·lane.
// Other types split the code u of an element into planes, one after the other, every plane lane by lane:
// clang-format off: the formatter would join the rows of these tables.
//   8 bits:  two parts of 512 bytes (steps 0–1, 2–3), 16 bytes a lane: byte 2·j + element of the 8 of a step
//   4 bits:  16 bytes a lane, one 32-bit word for each step; pair j at bits 4·j and 16 + 4·j
//            (types with a codebook: gpu_codebook_bit(), so that either half of a word is one row's)
//   2 bits:  8 bytes a lane, word s / 2; with p = 4·(s & 1) + j at bits 2·p and 16 + 2·p
//   1 bit:   4 bytes a lane; with p = 4·s + j at bits p and 16 + p
// u is the file's code; signed bytes (q8_0, q8_16) are stored biased by 128.
//
// Scales of a tile, for g < 8 in order (r = rows g and g + 8, b = 32-blocks of the tile, s = 16-blocks):
//   f16 d                 {d[g][0], d[g][1], d[g+8][0], d[g+8][1]}                       8 bytes
//   f16 d, m              {d, m of [g][0], [g][1], [g+8][0], [g+8][1]}                  16 bytes
//   f32 d, scale of 16    {d[g], d[g+8]}, then {sc[g][s], sc[g+8][s]} for s = 0 … 3         16 bytes, signed: + 128
//   e8m0                  {e[g][0], e[g+8][0], e[g][1], e[g+8][1]}                       4 bytes
//   scale, min (q4_k …)   {sc[g][b], sc[g+8][b], m[g][b], m[g+8][b]} for b = 0, 1         8 bytes
//   scale of 16           {sc[g][s], sc[g+8][s]} for s = 0 … 3                            8 bytes, signed: + 128
//   byte of 16 (q4_16)    as "scale of 16", the file's bytes                              8 bytes
//   scale of 32 (iq4_xs)  {sc[g][b], sc[g+8][b]} for b = 0, 1                             4 bytes, biased by 128
// clang-format on
// d of a super-block, for g < 8 in order: {d[g], d[g+8]} (4 bytes) or {d[g], d[g+8], dmin[g], dmin[g+8]} (8 bytes). Of
// q4_16 {d[g], d[g+8]} in float32 (8 bytes), and then for all rows the table biased by 128 (16 bytes) and 16 bytes, of
// which the first two are the bias and the shift.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace dyno::ops {

inline constexpr int kGpuRows = 16;  // in a stripe
inline constexpr int kGpuTile = 64;  // elements of k in a tile

enum class GpuScale : uint8_t {
  none,       // f16, bf16
  d,          // w = d·(u − offset)
  d_m,        // w = d·u + m
  d_scale16,  // w = d·sc·(u − offset), d in float32, 16-blocks
  e8m0,       // w = 2^(e − 128)·codebook[u]
  k_min32,    // w = d·sc·u − dmin·m, 32-blocks
  k_min16,    // the same with 4-bit sc and m in one byte, 16-blocks
  k_scale16,  // w = d·sc·(u − offset), 16-blocks
  k_scale32,  // w = d·sc·codebook[u], 32-blocks
  f_table16,  // w = d·((byte & 254) − bias)·(table[u] + (byte & 1)·shift), d in float32, 16-blocks
};
enum class GpuCodebook : uint8_t { none, iq4nl, mxfp4, table };

struct GpuFormat {
  int low_bits = 0;   // first plane: 16 (floats), 8, 4, 2
  int high_bits = 0;  // second plane: 0, 1, 2
  int offset = 0;     // subtracted from u
  GpuScale scale = GpuScale::none;
  GpuCodebook codebook = GpuCodebook::none;

  constexpr int bits() const { return low_bits + high_bits; }
  constexpr bool lookup() const { return codebook != GpuCodebook::none; }
  constexpr bool super_block() const { return scale >= GpuScale::k_min32; }
  constexpr int code_bytes() const { return kGpuRows * kGpuTile * bits() / 8; }  // per tile
  constexpr int scale_bytes() const {                                            // per tile
    switch (scale) {
      case GpuScale::none:
        return 0;
      case GpuScale::d_m:
      case GpuScale::d_scale16:
        return 128;
      case GpuScale::e8m0:
      case GpuScale::k_scale32:
        return 32;
      default:
        return 64;
    }
  }
  constexpr int super_row_bytes() const {  // d and dmin of the rows of a super-block
    if (!super_block()) return 0;
    return scale == GpuScale::k_min32 || scale == GpuScale::k_min16 || scale == GpuScale::f_table16 ? 64 : 32;
  }
  constexpr int table_bytes() const { return codebook == GpuCodebook::table ? 32 : 0; }  // per super-block
  constexpr int super_bytes() const { return super_row_bytes() + table_bytes(); }
  constexpr int tile_bytes() const { return code_bytes() + scale_bytes(); }
  constexpr int unit_k() const { return super_block() ? 256 : kGpuTile; }
  constexpr int unit_bytes() const {  // per tile or, for types with super-blocks, per 4 tiles with their d
    return super_block() ? 4 * tile_bytes() + super_bytes() : tile_bytes();
  }
};

// For a type without this layout (f32), low_bits = 0.
constexpr GpuFormat gpu_format(DType type) {
  switch (type) {
    case DType::f16:
    case DType::bf16:
      return {16, 0, 0, GpuScale::none, GpuCodebook::none};
    case DType::q4_0:
      return {4, 0, 8, GpuScale::d, GpuCodebook::none};
    case DType::q4_1:
      return {4, 0, 0, GpuScale::d_m, GpuCodebook::none};
    case DType::q5_0:
      return {4, 1, 16, GpuScale::d, GpuCodebook::none};
    case DType::q5_1:
      return {4, 1, 0, GpuScale::d_m, GpuCodebook::none};
    case DType::q8_0:
      return {8, 0, 128, GpuScale::d, GpuCodebook::none};
    case DType::q8_16:
      return {8, 0, 128, GpuScale::d_scale16, GpuCodebook::none};
    case DType::q4_16:
      return {4, 0, 0, GpuScale::f_table16, GpuCodebook::table};
    case DType::q2_k:
      return {2, 0, 0, GpuScale::k_min16, GpuCodebook::none};
    case DType::q3_k:
      return {2, 1, 4, GpuScale::k_scale16, GpuCodebook::none};
    case DType::q4_k:
      return {4, 0, 0, GpuScale::k_min32, GpuCodebook::none};
    case DType::q5_k:
      return {4, 1, 0, GpuScale::k_min32, GpuCodebook::none};
    case DType::q6_k:
      return {4, 2, 32, GpuScale::k_scale16, GpuCodebook::none};
    case DType::iq4_nl:
      return {4, 0, 0, GpuScale::d, GpuCodebook::iq4nl};
    case DType::iq4_xs:
      return {4, 0, 0, GpuScale::k_scale32, GpuCodebook::iq4nl};
    case DType::mxfp4:
      return {4, 0, 0, GpuScale::e8m0, GpuCodebook::mxfp4};
    default:
      return {};
  }
}

// Bit position of element e of pair j in a step's word of codes, for table lookups: a row has 2·t, 2·t + 8, 2·t + 1 and
// 2·t + 9, which is also the order of the codes in the bytes of other types with 4 bits.
constexpr int gpu_codebook_bit(int j, int e) { return 16 * (j & 1) + 8 * e + 4 * (j >> 1); }

constexpr bool has_gpu_layout(DType type) { return gpu_format(type).low_bits != 0; }

// Whether repack_gpu_from_x16() supports a type: all types whose codes are in layout x16.
constexpr bool packs_from_x16(DType type) {
  return has_gpu_layout(type) && gpu_format(type).low_bits != 16 && type != DType::q8_16 && type != DType::q4_16;
}

constexpr int64_t gpu_stripe_bytes(DType type, int64_t k) {
  const GpuFormat f = gpu_format(type);
  return (k + f.unit_k() - 1) / f.unit_k() * f.unit_bytes();
}
// Bytes of one matrix [n, k]; experts follow each other at this distance.
constexpr int64_t gpu_layout_bytes(DType type, int64_t n, int64_t k) {
  return (n + kGpuRows - 1) / kGpuRows * gpu_stripe_bytes(type, k);
}

// Repacks stripes [first, last) of the matrix [n, k] at `plain` (rows as in the file) to `out`, where stripe 0 starts
// at out[0]. Stripes are independent, so callers divide them among threads. Throws UnsupportedError for a type without
// this layout or a k that is not a multiple of its block.
void repack_gpu(DType type, int64_t n, int64_t k, const std::byte* plain, std::byte* out, int64_t first, int64_t last);

// Writes the same bytes from a matrix in layout x16, which the CPU's kernels read and in which the CPU keeps weights
// that a GPU copies. Throws UnsupportedError for a type without both layouts or a k that is not a multiple of its
// block.
void repack_gpu_from_x16(DType type, int64_t n, int64_t k, const std::byte* x16, std::byte* out, int64_t first,
                         int64_t last);

// Row `row` in float32, as a kernel reads it: equal to dequantize_row() of the file's bytes.
void dequantize_gpu_row(DType type, int64_t k, const std::byte* packed, int64_t row, float* out);

}  // namespace dyno::ops
