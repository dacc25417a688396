// One row of a file block as integers: the 32 values of group number `sub`, as u (codebook types: the index; 8-bit
// types: as in tiles, see unpack.h). Reads nothing outside the block. Kernel sources only.
#pragma once

#include "ops/matmul/quant_format.h"
#include "ops/matmul/simd.h"

namespace DYNO_KERNEL_NAMESPACE {

// Whether tiles of this type have signed bytes.
template <DType T>
inline constexpr bool kBytesSigned =
    kSignedBytes &&
    (kFormat<T>.bits == 8 || (kFormat<T>.lookup && code_range(*kCodebook<T>, kShift<T>) > kMaxUnsignedRange));

#if defined(__AVX2__)

inline __m256i bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// 16 bytes: low nibbles, then high nibbles.
inline __m256i nibbles(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(x, 4), x), bytes(15));
}
// Bit i of 32 bits, moved to bit 4 of byte i.
inline __m256i fifth_bits(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit_of = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), byte_of), bit_of);
  return _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit_of), bytes(16));
}
// (x >> shift) & mask in every byte.
inline __m256i field(__m256i x, int shift, int mask) {
  return _mm256_and_si256(_mm256_srl_epi16(x, _mm_cvtsi32_si128(shift)), bytes(mask));
}

template <DType T>
inline Row32 unpack_row(const uint8_t* block, int sub) {
  if constexpr (T == DType::q4_0 || T == DType::iq4_nl) {
    return nibbles(block + 2);
  } else if constexpr (T == DType::q4_1) {
    return nibbles(block + 4);
  } else if constexpr (T == DType::mxfp4) {
    return nibbles(block + 1);
  } else if constexpr (T == DType::q5_0) {
    return _mm256_or_si256(nibbles(block + 6), fifth_bits(block + 2));
  } else if constexpr (T == DType::q5_1) {
    return _mm256_or_si256(nibbles(block + 8), fifth_bits(block + 4));
  } else if constexpr (T == DType::q8_0) {
    return kBytesSigned<T> ? load_32(block + 2) : _mm256_xor_si256(load_32(block + 2), bytes(0x80));
  } else if constexpr (T == DType::iq4_xs) {
    return nibbles(block + 8 + 16 * sub);
  } else if constexpr (T == DType::q4_k) {
    return field(load_32(block + 16 + 32 * (sub >> 1)), 4 * (sub & 1), 15);
  } else if constexpr (T == DType::q5_k) {
    const __m256i low = field(load_32(block + 48 + 32 * (sub >> 1)), 4 * (sub & 1), 15);
    return _mm256_or_si256(low, _mm256_slli_epi16(field(load_32(block + 16), sub, 1), 4));
  } else {
    const int half = sub >> 2, quarter = sub & 3;
    if constexpr (T == DType::q6_k) {
      const __m256i low = field(load_32(block + 64 * half + 32 * (quarter & 1)), 4 * (quarter >> 1), 15);
      const __m256i high = field(load_32(block + 128 + 32 * half), 2 * quarter, 3);
      return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
    } else if constexpr (T == DType::q3_k) {
      const __m256i low = field(load_32(block + 32 + 32 * half), 2 * quarter, 3);
      return _mm256_or_si256(low, _mm256_slli_epi16(field(load_32(block), sub, 1), 2));
    } else {
      static_assert(T == DType::q2_k);
      return field(load_32(block + 16 + 32 * half), 2 * quarter, 3);
    }
  }
}

#else

inline void nibbles_low_high(const uint8_t* p, uint8_t* out) {
  for (int i = 0; i < 16; ++i) {
    out[i] = p[i] & 15;
    out[i + 16] = static_cast<uint8_t>(p[i] >> 4);
  }
}

inline void add_bits_32(const uint8_t* bits, uint8_t* out) {
  for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] | (bits[i >> 3] >> (i & 7) & 1) << 4);
}

// The 32 values of group number `sub` of a file block, as u; for codebook types the index.
template <DType T>
DYNO_OUTLINE inline void unpack_block(const uint8_t* block, int sub, uint8_t* out) {
  if constexpr (T == DType::q4_0 || T == DType::iq4_nl) {
    nibbles_low_high(block + 2, out);
  } else if constexpr (T == DType::q4_1) {
    nibbles_low_high(block + 4, out);
  } else if constexpr (T == DType::mxfp4) {
    nibbles_low_high(block + 1, out);
  } else if constexpr (T == DType::q5_0) {
    nibbles_low_high(block + 6, out);
    add_bits_32(block + 2, out);
  } else if constexpr (T == DType::q5_1) {
    nibbles_low_high(block + 8, out);
    add_bits_32(block + 4, out);
  } else if constexpr (T == DType::q8_0) {
    for (int i = 0; i < 32; ++i) out[i] = block[2 + i] ^ (kBytesSigned<T> ? 0 : 0x80);
  } else if constexpr (T == DType::iq4_xs) {
    nibbles_low_high(block + 8 + 16 * sub, out);
  } else if constexpr (T == DType::q4_k || T == DType::q5_k) {
    const uint8_t* q = block + (T == DType::q4_k ? 16 : 48) + 32 * (sub >> 1);
    const int shift = 4 * (sub & 1);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(q[i] >> shift & 15);
    if constexpr (T == DType::q5_k) {
      for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(out[i] | (block[16 + i] >> sub & 1) << 4);
    }
  } else {
    const int half = sub >> 2, quarter = sub & 3;
    if constexpr (T == DType::q6_k) {
      const uint8_t* low = block + 64 * half + 32 * (quarter & 1);
      const uint8_t* high = block + 128 + 32 * half;
      const int shift = 4 * (quarter >> 1);
      for (int i = 0; i < 32; ++i) {
        out[i] = static_cast<uint8_t>((low[i] >> shift & 15) | (high[i] >> (2 * quarter) & 3) << 4);
      }
    } else if constexpr (T == DType::q3_k) {
      const uint8_t* q = block + 32 + 32 * half;
      for (int i = 0; i < 32; ++i) {
        out[i] = static_cast<uint8_t>((q[i] >> (2 * quarter) & 3) | (block[i] >> sub & 1) << 2);
      }
    } else {
      static_assert(T == DType::q2_k);
      const uint8_t* q = block + 16 + 32 * half;
      for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(q[i] >> (2 * quarter) & 3);
    }
  }
}

template <DType T>
inline Row32 unpack_row(const uint8_t* block, int sub) {
  Row32 row;
  unpack_block<T>(block, sub, row.v);
  return row;
}

#endif

}  // namespace DYNO_KERNEL_NAMESPACE
