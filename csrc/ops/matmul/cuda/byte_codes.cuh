// A chunk of a stripe in shared memory (16 rows by 256 k of Layout::gpu) of a type with a lookup table, multiplied by
// one row of x: signed bytes on tensor cores with exact integer sums.
//
// A table has two registers of values below zero (codes 0 … 7) and two of the other values. Both are indexed with the
// unmodified codes: for a code of 8 or more, a permutation returns the sign of the selected byte. So the first two
// registers give −1 for the codes of the others, which have their values plus 1; and those give 0 for the codes of the
// first. The tensor cores add the two, so that no code is masked and no result selected. The codes of mxfp4 have a sign
// and a magnitude: their first half is not below zero, so the plus 1 moves there, except for magnitude 0, whose
// negative has no sign. Their bits are in the order of RowUnit::kPairs.
//
// Values of x are 16-bit numbers, as two signed bytes (ring_rows.cuh). Column 2·c + i of an MMA has byte i (the high
// one first) of the blocks of k that belong to column c; other blocks are zeros.
#pragma once

#include "ops/matmul/cuda/block_codes.cuh"
#include "ops/matmul/cuda/row_codes.cuh"

namespace dyno::ops::cuda {

// The table of a type, and sums over 16 or 32 k of rows g and g + 8.
template <DType kType>
struct ByteCodes : BlockCodes<kType> {
  using Base = BlockCodes<kType>;
  using Base::kFormat;
  static constexpr bool kSmall = kFormat.scale == GpuScale::f_table16;  // blocks of 16
  static constexpr bool kPairs = kFormat.codebook == GpuCodebook::mxfp4;

  // Codes 0 … 7, then codes 8 … 15 plus 1; of mxfp4 twice the values, and the plus 1 with the first.
  static __device__ __forceinline__ void table(const uint8_t* chunk, int tiles, uint32_t (&out)[4]) {
    if constexpr (kSmall) {
      Base::template words<4>(out, chunk + 4 * kFormat.tile_bytes() + kFormat.super_row_bytes());
      out[0] |= 0x80808080u, out[1] |= 0x80808080u;  // without the bias of 128: below zero
      out[2] -= 0x7f7f7f7fu, out[3] -= 0x7f7f7f7fu;
    } else if constexpr (kPairs) {
      // 0 1 2 3 | 4 6 8 12 plus 1, except 0; then their negatives. In registers, as below.
      const auto zero = static_cast<uint32_t>(tiles >> 8);
      out[0] = zero ^ 0x04030200u, out[1] = zero ^ 0x0d090705u, out[2] = zero ^ 0xfdfeff00u,
      out[3] = zero ^ 0xf4f8fafcu;
    } else {
      // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113. Kept in registers: if the compiler knew that
      // they are constants, it would emit a move before each permutation.
      const auto zero = static_cast<uint32_t>(tiles >> 8);
      out[0] = zero ^ 0xbfad9881u, out[1] = zero ^ 0xf6eaddcfu, out[2] = zero ^ 0x271a0e02u,
      out[3] = zero ^ 0x725a4636u;
    }
  }

  // Adds the contribution of the chunk to `value` (rows g and g + 8). x, sums: of the chunk's slice.
  static __device__ __forceinline__ void chunk(const uint8_t* chunk, int tiles, const uint8_t* x, const int32_t* sums,
                                               int lane, float (&value)[2]) {
    const int g = lane >> 2, t = lane & 3, column = g >> 1;
    const uint8_t* of_lane = x + (g & 1) * 32 + t * 8;
    uint32_t book[4];
    table(chunk, tiles, book);
    // Blocks of 32: 2·column and the next one, with two steps each. Blocks of 16: column, column + 4, …
    constexpr int kSets = kSmall ? 4 : 2;
    uint32_t mine[kSets][2];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if constexpr (kSmall) {
        mine[set][0] = mine[set][1] =
            *reinterpret_cast<const uint32_t*>(of_lane + (set * 2 + (column >> 1)) * 64 + (column & 1) * 4);
      } else {
        Base::template words<2>(mine[set], of_lane + (column * 2 + set) * 64);
      }
    }
    int32_t products[kSets][4] = {};
    for_each_step([&]<int kTile>() {
      uint32_t codes[4];
      Base::template words<4>(codes, chunk + kTile * kFormat.tile_bytes() + lane * 16);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int both = 2 * kTile + pair;  // steps 2·both and 2·both + 1
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Indices of a step of both rows, or of a row of both steps. Then the operands of the row and the upper half
          // of k are those of the step and row g + 8.
          constexpr int kNext = kPairs ? 2 : 1;
          const uint32_t code = kPairs ? indices_of_row(codes[2 * pair], codes[2 * pair + 1], i) : codes[2 * pair + i];
          const uint32_t other = code ^ 0x88888888u;
          const int at = kPairs ? i : 2 * i;
          low[at] = device::permute_or_sign(book[0], book[1], code);
          low[at + kNext] = device::permute_or_sign(book[0], book[1], code >> 16);
          high[at] = device::permute_or_sign(book[2], book[3], other);
          high[at + kNext] = device::permute_or_sign(book[2], book[3], other >> 16);
        }
        const int set = kSmall ? both / 2 : both % 2;
        const bool first = column == (kSmall ? both % 2 * 2 : both / 2);
        const bool second = kSmall ? column == both % 2 * 2 + 1 : first;
        const uint32_t b0 = first ? mine[set][0] : 0u, b1 = second ? mine[set][1] : 0u;
        device::mma_s8(products[set], low, b0, b1);
        device::mma_s8(products[set], high, b0, b1);
      }
    });
    if constexpr (kSmall) {
      const uint8_t* super = chunk + 4 * kFormat.tile_bytes();
      uint32_t d[2], more[1], pairs[2];
      Base::template words<2>(d, super + g * 8);
      Base::template words<1>(more, super + kFormat.super_row_bytes() + 16);
      const uint8_t* scales = chunk + kFormat.code_bytes() + g * 8 + t * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pairs[i] =
            static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(scales + (2 * i) * kFormat.tile_bytes())) |
            static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(scales + (2 * i + 1) * kFormat.tile_bytes()))
                << 16;
      }
      int32_t of_blocks[4][2];
#pragma unroll
      for (int set = 0; set < 4; ++set) {
#pragma unroll
        for (int r = 0; r < 2; ++r) of_blocks[set][r] = products[set][2 * r] * 256 + products[set][2 * r + 1];
      }
      const int shift = static_cast<int>(more[0] << 16) >> 24;
      if (shift != 0) {  // uniform within a matrix
        uint32_t of_x[4];
        Base::template words<4>(of_x, reinterpret_cast<const uint8_t*>(sums + 4 * t));
#pragma unroll
        for (int set = 0; set < 4; ++set) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const bool odd = (pairs[set / 2] & 1u << (set % 2 * 16 + r * 8)) != 0;
            if (odd) of_blocks[set][r] += static_cast<int32_t>(of_x[set]) * shift;
          }
        }
      }
      const float bias = __uint_as_float(0x4b000000u | (more[0] & 0xffu));
      float total[2] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t even = pairs[i] & 0xfefefefeu;
        total[0] += Base::template byte<0>(even, bias) * static_cast<float>(of_blocks[2 * i][0]);
        total[1] += Base::template byte<1>(even, bias) * static_cast<float>(of_blocks[2 * i][1]);
        total[0] += Base::template byte<2>(even, bias) * static_cast<float>(of_blocks[2 * i + 1][0]);
        total[1] += Base::template byte<3>(even, bias) * static_cast<float>(of_blocks[2 * i + 1][1]);
      }
      value[0] += __uint_as_float(d[0]) * total[0], value[1] += __uint_as_float(d[1]) * total[1];
    } else {
      constexpr float kStep = kPairs ? 0.5f : 1.0f;  // of the bytes
      const auto factors = Base::factors(chunk, 0, tiles, lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int set = 0; set < 2; ++set) {
          const int32_t product = products[set][2 * r] * 256 + products[set][2 * r + 1];
          value[r] += kStep * factors.scale[r][set] * static_cast<float>(product);
        }
      }
    }
  }
};

}  // namespace dyno::ops::cuda
