// Computes one 32-bit word of Layout::gpu from the file's blocks or from layout x16, and single elements of blocks, on
// the host and on the device. gpu_layout.h describes the layout, gguf/quant_blocks.h the blocks, layout.h and unpack.h
// x16.
#pragma once

#include <cstdint>
#include <cstring>

#include "gguf/quant_blocks.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/matmul/quant_format.h"

#ifdef __CUDACC__
#define DYNO_HOST_DEVICE __host__ __device__
#else
#define DYNO_HOST_DEVICE
#endif

namespace dyno::ops {

// clang-format off
template <DType kType> struct FileBlock;
template <> struct FileBlock<DType::q4_0> { using Type = BlockQ4_0; };
template <> struct FileBlock<DType::q4_1> { using Type = BlockQ4_1; };
template <> struct FileBlock<DType::q5_0> { using Type = BlockQ5_0; };
template <> struct FileBlock<DType::q5_1> { using Type = BlockQ5_1; };
template <> struct FileBlock<DType::q8_0> { using Type = BlockQ8_0; };
template <> struct FileBlock<DType::q2_k> { using Type = BlockQ2K; };
template <> struct FileBlock<DType::q3_k> { using Type = BlockQ3K; };
template <> struct FileBlock<DType::q4_k> { using Type = BlockQ4K; };
template <> struct FileBlock<DType::q5_k> { using Type = BlockQ5K; };
template <> struct FileBlock<DType::q6_k> { using Type = BlockQ6K; };
template <> struct FileBlock<DType::iq4_nl> { using Type = BlockIq4Nl; };
template <> struct FileBlock<DType::iq4_xs> { using Type = BlockIq4Xs; };
template <> struct FileBlock<DType::mxfp4> { using Type = BlockMxfp4; };
template <> struct FileBlock<DType::q8_16> { using Type = BlockQ8_16; };
template <> struct FileBlock<DType::q4_16> { using Type = BlockQ4_16; };
template <> struct FileBlock<DType::f16> { using Type = uint16_t; };
template <> struct FileBlock<DType::bf16> { using Type = uint16_t; };
template <> struct FileBlock<DType::f32> { using Type = float; };
// clang-format on

template <DType kType>
inline constexpr int kFileBlock = gpu_format(kType).super_block()                           ? kSuperBlock
                                  : gpu_format(kType).low_bits == 16 || kType == DType::f32 ? 1
                                  : kType == DType::q8_16                                   ? kQ8_16Block
                                                                                            : kQuantBlock;

// The code u of element i of a block, or the bits of an f16 or bf16 value.
template <DType kType>
DYNO_HOST_DEVICE inline uint32_t code_of(const typename FileBlock<kType>::Type& block, int i) {
  if constexpr (kType == DType::f16 || kType == DType::bf16) {
    return block;
  } else if constexpr (kType == DType::q8_0 || kType == DType::q8_16) {
    return static_cast<uint8_t>(block.qs[i]) ^ 0x80u;
  } else if constexpr (kType == DType::q2_k) {
    return (block.qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3u;
  } else if constexpr (kType == DType::q3_k) {
    return ((block.qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3u) | ((block.hmask[i % 32] >> (i / 32)) & 1u)
                                                                                << 2;
  } else if constexpr (kType == DType::q6_k) {
    return ((block.ql[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4)) & 15u) |
           ((block.qh[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2)) & 3u) << 4;
  } else if constexpr (kType == DType::q4_k || kType == DType::q5_k) {
    uint32_t code = (block.qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4)) & 15u;
    if constexpr (kType == DType::q5_k) code |= ((block.qh[i % 32] >> (i / 32)) & 1u) << 4;
    return code;
  } else {  // 32-blocks, also the eight of iq4_xs
    uint32_t code = (block.qs[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4)) & 15u;
    if constexpr (kType == DType::q5_0 || kType == DType::q5_1) code |= ((block.qh[i / 8] >> (i % 8)) & 1u) << 4;
    return code;
  }
}

// Scale and min of sub-block s as bytes; signed scales are biased by 128.
template <DType kType>
DYNO_HOST_DEVICE inline uint32_t sub_scale(const typename FileBlock<kType>::Type& block, int s) {
  if constexpr (kType == DType::q2_k) {
    return block.scales[s];  // both nibbles
  } else if constexpr (kType == DType::q4_k || kType == DType::q5_k) {
    return s < 4 ? block.scales[s] & 0x3fu : (block.scales[s + 4] & 0x0fu) | ((block.scales[s - 4] >> 2) & 0x30u);
  } else if constexpr (kType == DType::q4_16) {
    return block.scales[s];
  } else if constexpr (kType == DType::q6_k || kType == DType::q8_16) {
    return static_cast<uint8_t>(block.scales[s]) ^ 0x80u;
  } else if constexpr (kType == DType::q3_k) {
    const uint32_t low = (block.scales[s % 8] >> (s / 8 * 4)) & 0x0fu;
    return (low | ((block.scales[8 + s % 4] >> (s / 4 * 2)) & 3u) << 4) + 96;  // −32 and the bias
  } else if constexpr (kType == DType::iq4_xs) {
    const uint32_t low = (block.scales_l[s / 2] >> (s % 2 * 4)) & 0x0fu;
    return (low | ((static_cast<uint32_t>(block.scales_h) >> (2 * s)) & 3u) << 4) + 96;
  } else {
    return 0;
  }
}
template <DType kType>
DYNO_HOST_DEVICE inline uint32_t sub_min(const typename FileBlock<kType>::Type& block, int s) {
  static_assert(kType == DType::q4_k || kType == DType::q5_k);
  return s < 4 ? block.scales[s + 4] & 0x3fu : (block.scales[s + 4] >> 4) | ((block.scales[s] >> 2) & 0x30u);
}

template <DType kType>
DYNO_HOST_DEVICE inline float codebook_value(uint32_t code) {
  constexpr GpuFormat f = gpu_format(kType);
  if constexpr (f.codebook == GpuCodebook::iq4nl) {
    constexpr int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return values[code];
  } else if constexpr (f.codebook == GpuCodebook::mxfp4) {
    constexpr int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return values[code];
  } else {
    return static_cast<float>(static_cast<int>(code) - f.offset);
  }
}

// Element i of a block in float32, with the reference's order of operations (gguf/dequantize.cpp).
template <DType kType>
DYNO_HOST_DEVICE inline float value_of(const typename FileBlock<kType>::Type& block, int i) {
  constexpr GpuFormat f = gpu_format(kType);
  if constexpr (kType == DType::f32) {
    return block;
  } else if constexpr (kType == DType::f16) {
    return f16_to_f32(block);
  } else if constexpr (kType == DType::bf16) {
    return bf16_to_f32(block);
  } else {
    const float q = codebook_value<kType>(code_of<kType>(block, i));
    if constexpr (f.scale == GpuScale::d) {
      return f16_to_f32(block.d) * q;
    } else if constexpr (f.scale == GpuScale::d_m) {
      return f16_to_f32(block.d) * q + f16_to_f32(block.m);
    } else if constexpr (f.scale == GpuScale::d_scale16) {
      return block.d * static_cast<float>(block.scales[i / 16]) * q;
    } else if constexpr (f.scale == GpuScale::e8m0) {
      return e8m0_half_to_f32(block.e) * q;
    } else if constexpr (f.scale == GpuScale::k_min32) {
      const float d = f16_to_f32(block.d) * static_cast<float>(sub_scale<kType>(block, i / 32));
      return d * q - f16_to_f32(block.dmin) * static_cast<float>(sub_min<kType>(block, i / 32));
    } else if constexpr (f.scale == GpuScale::k_min16) {
      const uint32_t both = sub_scale<kType>(block, i / 16);
      const float d = f16_to_f32(block.d) * static_cast<float>(both & 15);
      return d * q - f16_to_f32(block.dmin) * static_cast<float>(both >> 4);
    } else if constexpr (f.scale == GpuScale::f_table16) {
      const int byte = block.scales[i / 16], code = static_cast<int>(code_of<kType>(block, i));
      const float s = block.d * static_cast<float>((byte & 254) - block.bias);
      return s * static_cast<float>(block.table[code] + (byte & 1) * block.shift);
    } else {
      constexpr int kSub = f.scale == GpuScale::k_scale16 ? 16 : 32;
      const int scale = static_cast<int>(sub_scale<kType>(block, i / kSub)) - 128;
      return f16_to_f32(block.d) * static_cast<float>(scale) * q;
    }
  }
}

DYNO_HOST_DEVICE inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Rows of a matrix in the file's order. Elements beyond n and k are zero bits.
template <DType kType>
struct FileRows {
  using Block = typename FileBlock<kType>::Type;
  using Index = int64_t;
  const uint8_t* base = nullptr;
  int64_t n = 0, k = 0;

  // Blocks may be unaligned in a mapped file, so only their fields are read, not wider words.
  DYNO_HOST_DEVICE const Block* block(int64_t row, int64_t at_k) const {
    if (row >= n || at_k >= k) return nullptr;
    const int64_t blocks = k / kFileBlock<kType>;
    return reinterpret_cast<const Block*>(base) + row * blocks + at_k / kFileBlock<kType>;
  }
  DYNO_HOST_DEVICE uint32_t code(int64_t row, int64_t at_k) const {
    const Block* b = block(row, at_k);
    return b == nullptr ? 0u : code_of<kType>(*b, static_cast<int>(at_k % kFileBlock<kType>));
  }
  // The bits of d (or of the e8m0 exponent), and of m or dmin, of the block at `at_k`.
  DYNO_HOST_DEVICE uint32_t d(int64_t row, int64_t at_k) const {
    const Block* b = block(row, at_k);
    if constexpr (gpu_format(kType).scale == GpuScale::e8m0) {
      return b == nullptr ? 0u : b->e;
    } else if constexpr (gpu_format(kType).scale == GpuScale::d_scale16 ||
                         gpu_format(kType).scale == GpuScale::f_table16) {
      return b == nullptr ? 0u : bits_of(b->d);
    } else {
      return b == nullptr ? 0u : b->d;
    }
  }
  DYNO_HOST_DEVICE uint32_t m(int64_t row, int64_t at_k) const {
    const Block* b = block(row, at_k);
    if constexpr (gpu_format(kType).scale == GpuScale::d_m) {
      return b == nullptr ? 0u : b->m;
    } else {
      return b == nullptr ? 0u : b->dmin;
    }
  }
  // Word `word` of the table and of the bytes after it, of the block at `at_k`, which must exist.
  DYNO_HOST_DEVICE uint32_t table(int64_t row, int64_t at_k, int word) const {
    const Block* b = block(row, at_k);
    if (word > 4) return 0;
    if (word == 4) return b->bias | static_cast<uint32_t>(static_cast<uint8_t>(b->shift)) << 8;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= (static_cast<uint8_t>(b->table[4 * word + i]) ^ 0x80u) << (8 * i);
    return out;
  }
  // As sub_scale() and sub_min() for the super-block at `at_k`.
  DYNO_HOST_DEVICE uint32_t scale(int64_t row, int64_t at_k, int s) const {
    const Block* b = block(row, at_k);
    return b == nullptr ? 0u : sub_scale<kType>(*b, s);
  }
  DYNO_HOST_DEVICE uint32_t min(int64_t row, int64_t at_k, int s) const {
    const Block* b = block(row, at_k);
    return b == nullptr ? 0u : sub_min<kType>(*b, s);
  }
};

constexpr int kX16Rows = 16;
constexpr int kX16RunK = 512;  // elements of k that are repacked together: whole units

// The same for 16 rows, a tile of layout x16, of which `n` exist. `base`: the record of the block at k = 0.
template <DType kType>
struct X16Rows {
  static constexpr WeightFormat format = kFormat<kType>;
  static constexpr int per_block = format.block, bits = format.bits;
  static constexpr int record = record_bytes(format), header = header_bytes(format), planes = planes_bytes(format);
  static_assert(packs_from_x16(kType) && kFileBlock<kType> == per_block && shift_bytes(format) == 0);
  static_assert(kX16Rows == kGpuRows && record % 16 == 0);  // a tile becomes a stripe, with 16-byte loads
  using Index = int;                                        // on the GPU, a block has few records
  const uint8_t* base = nullptr;
  int n = 0, k = 0;

  DYNO_HOST_DEVICE const uint8_t* block(int row, int at_k) const {
    return row >= n || at_k >= k ? nullptr : base + static_cast<size_t>(at_k / per_block) * record;
  }
  DYNO_HOST_DEVICE uint32_t code(int row, int at_k) const {
    const uint8_t* p = block(row, at_k);
    if (p == nullptr) return 0;
    const int i = at_k % per_block, step = i % 32 / 4;
    p += header + i / 32 * planes + 4 * row + i % 4;
    if constexpr (bits == 8) {
      return p[64 * step];
    } else if constexpr (bits >= 4) {
      uint32_t code = (p[64 * (step % 4)] >> (step / 4 * 4)) & 15u;
      if constexpr (bits == 5) code |= ((p[256] >> step) & 1u) << 4;
      if constexpr (bits == 6) code |= ((p[256 + 64 * (step / 4)] >> (step % 4 * 2)) & 3u) << 4;
      return code;
    } else {
      uint32_t code = (p[64 * (step / 4)] >> (step % 4 * 2)) & 3u;
      if constexpr (bits == 3) code |= ((p[128] >> step) & 1u) << 2;
      return code;
    }
  }
  DYNO_HOST_DEVICE uint32_t d(int row, int at_k) const {
    const uint8_t* p = block(row, at_k);
    if (p == nullptr) return 0;
    if constexpr (format.header == Header::e8m0) {
      return p[row];
    } else {
      return half_at(p + 2 * row);
    }
  }
  DYNO_HOST_DEVICE uint32_t m(int row, int at_k) const {
    const uint8_t* p = block(row, at_k);
    return p == nullptr ? 0u : half_at(p + 32 + 2 * row);
  }
  DYNO_HOST_DEVICE uint32_t scale(int row, int at_k, int s) const {
    const uint8_t* p = block(row, at_k);
    if (p == nullptr) return 0;
    constexpr bool kMins = format.header == Header::k_min32 || format.header == Header::k_min16;
    return kMins ? p[64 + 16 * s + row] : p[32 + 16 * s + row] ^ 0x80u;
  }
  DYNO_HOST_DEVICE uint32_t min(int row, int at_k, int s) const {
    const uint8_t* p = block(row, at_k);
    return p == nullptr ? 0u : p[64 + 128 + 16 * s + row];
  }

 private:
  DYNO_HOST_DEVICE static uint32_t half_at(const uint8_t* p) { return p[0] | static_cast<uint32_t>(p[1]) << 8; }
};

// The row within a stripe and the k within a tile of step s, pair j, element e in lane `lane`.
DYNO_HOST_DEVICE constexpr int gpu_pair_row(int lane, int j) { return lane / 4 + 8 * (j & 1); }
DYNO_HOST_DEVICE constexpr int gpu_pair_k(int lane, int s, int j, int e) {
  return 16 * s + 2 * (lane % 4) + 8 * (j >> 1) + e;
}

// Codes: word `word` of the planes of the tile at (row0, k0).
template <DType kType, typename Rows>
DYNO_HOST_DEVICE inline uint32_t pack_codes(const Rows& rows, typename Rows::Index row0, typename Rows::Index k0,
                                            int word) {
  constexpr GpuFormat f = gpu_format(kType);
  const auto code = [&](int lane, int s, int j, int e) {
    return rows.code(row0 + gpu_pair_row(lane, j), k0 + gpu_pair_k(lane, s, j, e));
  };
  constexpr int kLowWords = kGpuRows * kGpuTile * f.low_bits / 32;
  uint32_t out = 0;
  if constexpr (f.low_bits == 16) {
    const int s = word / 128, lane = word % 128 / 4, j = word % 4;
    return code(lane, s, j, 0) | code(lane, s, j, 1) << 16;
  } else if constexpr (f.low_bits == 8) {
    const int lane = word % 128 / 4, s = word / 128 * 2 + word % 4 / 2;
    for (int i = 0; i < 4; ++i) {
      const int at = word % 2 * 4 + i;  // index among the 8 codes of a step
      out |= code(lane, s, at / 2, at % 2) << (8 * i);
    }
    return out;
  } else {
    const bool high = word >= kLowWords;
    const int bits = high ? f.high_bits : f.low_bits;
    const int shift = high ? f.low_bits : 0;
    const uint32_t mask = (1u << bits) - 1u;
    const int plane_word = high ? word - kLowWords : word;
    const int words_per_lane = 2 * bits / 2;  // 32 codes: 4 bits make 4 words, 2 make 2, 1 makes 1
    const int lane = plane_word / words_per_lane, at = plane_word % words_per_lane;
    const int pairs = 16 / bits;  // pairs in a word
    for (int p = 0; p < pairs; ++p) {
      const int s = (at * pairs + p) / 4, j = p % 4;
      const uint32_t low = (code(lane, s, j, 0) >> shift) & mask, up = (code(lane, s, j, 1) >> shift) & mask;
      const bool codebook_order = !high && f.lookup();
      out |= low << (codebook_order ? gpu_codebook_bit(j, 0) : bits * p) |
             up << (codebook_order ? gpu_codebook_bit(j, 1) : 16 + bits * p);
    }
    return out;
  }
}

// Scales: word `word` of the scales of the tile at (row0, k0).
template <DType kType, typename Rows>
DYNO_HOST_DEVICE inline uint32_t pack_scales(const Rows& rows, typename Rows::Index row0, typename Rows::Index k0,
                                             int word) {
  constexpr GpuFormat f = gpu_format(kType);
  if constexpr (f.scale == GpuScale::d) {
    const auto row = row0 + word / 2 + 8 * (word % 2);
    return rows.d(row, k0) | rows.d(row, k0 + 32) << 16;
  } else if constexpr (f.scale == GpuScale::d_m) {
    const auto row = row0 + word / 4 + 8 * (word % 4 / 2), k = k0 + 32 * (word % 2);
    return rows.d(row, k) | rows.m(row, k) << 16;
  } else if constexpr (f.scale == GpuScale::d_scale16) {
    const auto row = row0 + word / 4;
    if (word % 4 < 2) return rows.d(row + 8 * (word % 4), k0);
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= rows.scale(row + 8 * (i % 2), k0, word % 2 * 2 + i / 2) << (8 * i);
    return out;
  } else if constexpr (f.scale == GpuScale::e8m0) {
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= rows.d(row0 + word + 8 * (i % 2), k0 + 32 * (i / 2)) << (8 * i);
    return out;
  } else if constexpr (f.super_block()) {
    // The bytes of a word: rows g and g + 8 of a sub-block, then the same of the next sub-block, or their mins.
    constexpr int kSub =
        f.scale == GpuScale::k_min16 || f.scale == GpuScale::k_scale16 || f.scale == GpuScale::f_table16 ? 16 : 32;
    const int words = f.scale_bytes() / 32;  // per g
    const int g = word / words, w = word % words;
    const int first = static_cast<int>(k0 % kSuperBlock) / kSub;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) {
      const auto row = row0 + g + 8 * (i % 2);
      uint32_t byte = 0;
      if constexpr (f.scale == GpuScale::k_min32) {
        byte = i / 2 ? rows.min(row, k0, first + w) : rows.scale(row, k0, first + w);
      } else {
        byte = rows.scale(row, k0, first + 2 * w + i / 2);
      }
      out |= byte << (8 * i);
    }
    return out;
  } else {
    return 0;
  }
}

// Word `word` of the unit (gpu_format().unit_bytes()) at (row0, k0), from FileRows or X16Rows.
template <DType kType, typename Rows>
DYNO_HOST_DEVICE inline uint32_t pack_word(const Rows& rows, typename Rows::Index row0, typename Rows::Index k0,
                                           int word) {
  constexpr GpuFormat f = gpu_format(kType);
  constexpr int kTiles = f.super_block() ? 4 : 1;
  constexpr int kCodes = f.code_bytes() / 4, kScales = f.scale_bytes() / 4;
  if (word < kTiles * (kCodes + kScales)) {
    const int tile = word / (kCodes + kScales), at = word % (kCodes + kScales);
    if (at < kCodes) return pack_codes<kType>(rows, row0, k0 + tile * kGpuTile, at);
    if constexpr (kScales != 0) return pack_scales<kType>(rows, row0, k0 + tile * kGpuTile, at - kCodes);
  }
  word -= kTiles * (kCodes + kScales);
  if constexpr (f.codebook == GpuCodebook::table) {
    constexpr int kRows = f.super_row_bytes() / 4;
    if (word < kRows) return rows.d(row0 + word / 2 + 8 * (word % 2), k0);
    return rows.table(row0, k0, word - kRows);
  } else if constexpr (f.super_block()) {
    constexpr int kWords = f.super_bytes() / 32;  // per g
    const auto row = row0 + word / kWords;
    if constexpr (kWords == 2) {
      if (word % 2 == 1) return rows.m(row, k0) | rows.m(row + 8, k0) << 16;
    }
    return rows.d(row, k0) | rows.d(row + 8, k0) << 16;
  }
  return 0;
}

}  // namespace dyno::ops
