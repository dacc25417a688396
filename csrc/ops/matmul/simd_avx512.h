// simd.h for AVX-512 with VNNI.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 warns about its own _mm512_undefined_ps() wherever an intrinsic is inlined (gcc bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace DYNO_KERNEL_NAMESPACE {

using F = __m512;
using I = __m512i;
using B = __m512i;

// 8-bit weights stay unsigned (value + 128), as vpdpbusd needs.
inline constexpr bool kSignedBytes = false;
inline constexpr int kMaxAccumulators = 12;
inline constexpr int kMaxMatvec = 8;  // tokens that share one pass over weights

#define DYNO_OUTLINE

inline F f_zero() { return _mm512_setzero_ps(); }
inline F f_set1(float x) { return _mm512_set1_ps(x); }
inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F f_load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p); }
inline void f_store_n(float* p, F x, int n) { _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), x); }
inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
// Returns the second operand if either is NaN.
inline F f_min(F a, F b) { return _mm512_min_ps(a, b); }
inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F f_fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
inline F f_round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F f_exp2i(F n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }
inline F f_from_i(I a) { return _mm512_cvtepi32_ps(a); }
inline F f_from_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
inline F f_from_bf16(const void* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))), 16));
}
inline F f_from_u8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline F f_from_s8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}
inline F f_from_low_nibble(const void* p) {
  const I x = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return _mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(15)));
}
inline F f_from_high_nibble(const void* p) {
  const I x = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 4));
}
// 2^(e - 128) of E8M0 bytes, including subnormal results.
inline F f_from_e8m0_half(const void* p) {
  const I e = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const I normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
  const I small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2)), normal, small));
}
// Adds adjacent lanes first; every version uses the same tree.
inline float f_sum(F x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline I i_set1(int32_t x) { return _mm512_set1_epi32(x); }
inline B b_load(const void* p) { return _mm512_loadu_si512(p); }
inline void b_store(void* p, B x) { _mm512_storeu_si512(p, x); }
inline B b_set1(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
inline B b_and(B a, B b) { return _mm512_and_si512(a, b); }
inline B b_xor(B a, B b) { return _mm512_xor_si512(a, b); }
inline B b_or(B a, B b) { return _mm512_or_si512(a, b); }
// Bits move across byte boundaries: mask afterwards.
template <int N>
inline B b_shr(B a) {
  if constexpr (N == 0) return a;
  return _mm512_srli_epi16(a, N);
}
template <int N>
inline B b_shl(B a) {
  if constexpr (N == 0) return a;
  return _mm512_slli_epi16(a, N);
}
struct Lut {
  __m512i v;
};
inline Lut lut_load(const uint8_t* p16) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p16)))};
}
inline B b_lut(Lut t, B index) { return _mm512_shuffle_epi8(t.v, index); }
// Entries 0-15 of `low`, 16-31 of `high`.
inline B b_lut32(Lut low, Lut high, B index) {
  const __mmask64 upper = _mm512_test_epi8_mask(index, _mm512_set1_epi8(16));
  return _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(low.v, index), upper, high.v, index);
}
inline B b_add(B a, B b) { return _mm512_add_epi8(a, b); }
// `bytes` in the rows whose bit is set, zeros in other rows.
inline B b_rows(uint16_t rows, uint32_t bytes) {
  return _mm512_maskz_set1_epi32(static_cast<__mmask16>(rows), static_cast<int>(bytes));
}

// Sums of u8 x s8 products over a group of kSteps times 4 k. kWiden is the number of steps whose pair sums fit int16
// (AVX2 only).
using Activation4 = __m512i;
inline Activation4 act_broadcast(const void* p) {
  int32_t x;
  std::memcpy(&x, p, sizeof x);
  return _mm512_set1_epi32(x);
}
template <int kWiden>
struct Weight4 {
  B w;
  explicit Weight4(B x) : w(x) {}
};
template <int kWiden, int kSteps>
struct Dot {
  __m512i acc;
  void init(int32_t x) { acc = _mm512_set1_epi32(x); }
  void zero() { acc = _mm512_setzero_si512(); }
  template <int kStep>
  void step(const Weight4<kWiden>& w, Activation4 a) {
    acc = _mm512_dpbusd_epi32(acc, w.w, a);
  }
  I sum() const { return acc; }
};

// 16 rows of 32 bytes -> 8 tiles of 16 rows x 4 bytes.
using Row32 = __m256i;
inline void transpose_rows(const Row32 src[16], B out[8]) {
  __m512i z[8], t[8];
  for (int i = 0; i < 8; ++i) {
    z[i] = _mm512_inserti64x4(_mm512_castsi256_si512(src[i]), src[i + 8], 1);
  }
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm512_unpacklo_epi32(z[i], z[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(z[i], z[i + 1]);
  }
  // t[0] = rows 0,1 dwords 0,1 | t[2] = rows 2,3 dwords 0,1 (of each 128-bit lane)
  for (int h = 0; h < 8; h += 4) {
    z[h + 0] = _mm512_unpacklo_epi64(t[h + 0], t[h + 2]);
    z[h + 1] = _mm512_unpackhi_epi64(t[h + 0], t[h + 2]);
    z[h + 2] = _mm512_unpacklo_epi64(t[h + 1], t[h + 3]);
    z[h + 3] = _mm512_unpackhi_epi64(t[h + 1], t[h + 3]);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm512_permutex2var_epi64(z[i], low, z[i + 4]);
    out[i + 4] = _mm512_permutex2var_epi64(z[i], high, z[i + 4]);
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
