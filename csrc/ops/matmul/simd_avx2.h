// simd.h for AVX2 with FMA and F16C: every vector is a pair of registers, rows 0-7 and 8-15.
#pragma once

#include <immintrin.h>

namespace DYNO_KERNEL_NAMESPACE {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct B {
  __m256i a, b;
};

// 8-bit weights are signed here (value): vpmaddubsw would saturate with 255, but not with |value| <= 128.
inline constexpr bool kSignedBytes = true;
inline constexpr int kMaxAccumulators = 4;
inline constexpr int kMaxMatvec = 4;  // tokens that share one pass over weights

#define DYNO_OUTLINE

inline F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F f_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void f_store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F f_load_n(const float* p, int n) {
  alignas(32) float buffer[16] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(float));
  return f_load(buffer);
}
inline void f_store_n(float* p, F x, int n) {
  alignas(32) float buffer[16];
  f_store(buffer, x);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(float));
}
inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
// Returns the second operand if either is NaN.
inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F f_fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline F f_round(F x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
inline __m256 exp2i_half(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline F f_exp2i(F n) { return {exp2i_half(n.a), exp2i_half(n.b)}; }
inline F f_from_i(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F f_from_f16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline F f_from_bf16(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16))};
}
inline F f_from_u8(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F f_from_s8(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline F f_from_low_nibble(const void* p) {
  const __m128i x = _mm_and_si128(_mm_loadu_si128(static_cast<const __m128i*>(p)), _mm_set1_epi8(15));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F f_from_high_nibble(const void* p) {
  const __m128i x =
      _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)), 4), _mm_set1_epi8(15));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline __m256 e8m0_half(__m128i bytes) {
  const __m256i e = _mm256_cvtepu8_epi32(bytes);
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
  const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
}
// 2^(e - 128) of E8M0 bytes, including subnormal results.
inline F f_from_e8m0_half(const void* p) {
  const __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {e8m0_half(x), e8m0_half(_mm_srli_si128(x, 8))};
}
// Adds adjacent lanes first; every version uses the same tree.
inline float f_sum(F x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline I i_set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline B b_load(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline void b_store(void* p, B x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
inline B b_set1(int x) {
  const __m256i v = _mm256_set1_epi8(static_cast<char>(x));
  return {v, v};
}
inline B b_and(B x, B y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
inline B b_xor(B x, B y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
inline B b_or(B x, B y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
// Bits move across byte boundaries: mask afterwards.
template <int N>
inline B b_shr(B x) {
  if constexpr (N == 0) return x;
  return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)};
}
template <int N>
inline B b_shl(B x) {
  if constexpr (N == 0) return x;
  return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)};
}
struct Lut {
  __m256i v;
};
inline Lut lut_load(const uint8_t* p16) {
  return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p16)))};
}
inline B b_lut(Lut t, B index) { return {_mm256_shuffle_epi8(t.v, index.a), _mm256_shuffle_epi8(t.v, index.b)}; }
inline __m256i lut32_half(Lut low, Lut high, __m256i index) {
  const __m256i a = _mm256_shuffle_epi8(low.v, index), b = _mm256_shuffle_epi8(high.v, index);
  return _mm256_blendv_epi8(a, b, _mm256_slli_epi16(index, 3));  // bit 4 becomes the top bit
}
// Entries 0-15 of `low`, 16-31 of `high`.
inline B b_lut32(Lut low, Lut high, B index) {
  return {lut32_half(low, high, index.a), lut32_half(low, high, index.b)};
}
inline B b_add(B x, B y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
// `bytes` in the rows whose bit is set, zeros in other rows.
inline B b_rows(uint16_t rows, uint32_t bytes) {
  const __m256i all = _mm256_set1_epi32(rows), value = _mm256_set1_epi32(static_cast<int>(bytes));
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
  return {_mm256_and_si256(_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low), value),
          _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_and_si256(all, high), high), value)};
}

// Sums of products over a group of kSteps times 4 k. vpmaddubsw gives int16 sums of two products, which are accumulated
// in int16 for kWiden steps before they are widened. No sum saturates: with activations in [-127, 127] a step adds at
// most 2 * 127 * max(u), so u <= 16 allows 8 steps (32512), u <= 32 four, u <= 64 two, u <= 129 one (32766). kWiden = 0
// is for signed weights: |w| times sign(a, w), at most 2 * 128 * 127 = 32512.
using Activation4 = __m256i;
inline Activation4 act_broadcast(const void* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return _mm256_set1_epi32(x);
}
template <int kWiden>
struct Weight4 {
  B w;
  explicit Weight4(B x) : w(x) {}
};
template <>
struct Weight4<0> {
  B w, magnitude;
  explicit Weight4(B x) : w(x), magnitude{_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)} {}
};
template <int kWiden, int kSteps>
struct Dot {
  __m256i a32, b32, a16, b16;
  void init(int32_t x) { a32 = b32 = _mm256_set1_epi32(x); }
  void zero() { a32 = b32 = _mm256_setzero_si256(); }
  template <int kStep>
  void step(const Weight4<kWiden>& w, Activation4 x) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (kWiden == 0) {
      const __m256i p = _mm256_maddubs_epi16(w.magnitude.a, _mm256_sign_epi8(x, w.w.a));
      const __m256i q = _mm256_maddubs_epi16(w.magnitude.b, _mm256_sign_epi8(x, w.w.b));
      a32 = _mm256_add_epi32(a32, _mm256_madd_epi16(p, ones));
      b32 = _mm256_add_epi32(b32, _mm256_madd_epi16(q, ones));
    } else {
      const __m256i p = _mm256_maddubs_epi16(w.w.a, x);
      const __m256i q = _mm256_maddubs_epi16(w.w.b, x);
      a16 = kStep % kWiden == 0 ? p : _mm256_add_epi16(a16, p);
      b16 = kStep % kWiden == 0 ? q : _mm256_add_epi16(b16, q);
      if constexpr (kStep % kWiden == kWiden - 1 || kStep == kSteps - 1) {
        a32 = _mm256_add_epi32(a32, _mm256_madd_epi16(a16, ones));
        b32 = _mm256_add_epi32(b32, _mm256_madd_epi16(b16, ones));
      }
    }
  }
  I sum() const { return {a32, b32}; }
};

// 8 rows of 8 dwords -> their transpose.
using Row32 = __m256i;
inline void transpose_8x8(const Row32 z_in[8], __m256i out[8]) {
  __m256i z[8], t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(z_in[i], z_in[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(z_in[i], z_in[i + 1]);
  }
  for (int h = 0; h < 8; h += 4) {
    z[h + 0] = _mm256_unpacklo_epi64(t[h + 0], t[h + 2]);
    z[h + 1] = _mm256_unpackhi_epi64(t[h + 0], t[h + 2]);
    z[h + 2] = _mm256_unpacklo_epi64(t[h + 1], t[h + 3]);
    z[h + 3] = _mm256_unpackhi_epi64(t[h + 1], t[h + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(z[i], z[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(z[i], z[i + 4], 0x31);
  }
}

// 16 rows of 32 bytes -> 8 tiles of 16 rows x 4 bytes.
inline void transpose_rows(const Row32 src[16], B out[8]) {
  __m256i low[8], high[8];
  transpose_8x8(src, low);
  transpose_8x8(src + 8, high);
  for (int i = 0; i < 8; ++i) out[i] = {low[i], high[i]};
}

}  // namespace DYNO_KERNEL_NAMESPACE
