// f32 vectors of the width of this translation unit's instruction set. They use the compilers' vector extensions, so
// that one kernel source serves all instruction sets. Only for kernel sources: everything is in DYNO_KERNEL_NAMESPACE.
// A product followed by a sum becomes a fused multiply-add if the set has one (-ffp-contract=fast).
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/isa.h"

#if defined(__x86_64__)
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
#endif

#define DYNO_INLINE inline __attribute__((always_inline))

namespace DYNO_KERNEL_NAMESPACE {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef float vf_unaligned __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef int32_t vi_unaligned __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));
typedef uint16_t vh_unaligned __attribute__((vector_size(kLanes * 2), aligned(1), may_alias));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));
typedef int8_t vb_unaligned __attribute__((vector_size(kLanes), aligned(1), may_alias));
typedef int8_t vb __attribute__((vector_size(kLanes)));

DYNO_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
DYNO_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }

DYNO_INLINE vf broadcast(float x) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_set1_ps(x));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_set1_ps(x));
#else
  return vf{x, x, x, x};
#endif
}

DYNO_INLINE vi broadcast_int(int32_t x) { return x - vi{}; }

// Returns NaN if `b` is NaN.
DYNO_INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}
DYNO_INLINE vf min(vf a, vf b) { return -max(-a, -b); }

// Pairwise, so that the order of additions is the same for every caller.
DYNO_INLINE float horizontal_sum(vf v) {
  float lanes[kLanes];
  store(lanes, v);
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#endif
}

DYNO_INLINE float horizontal_max(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
  float lanes[kLanes];
  store(lanes, v);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}

// e^x with a relative error below 1.2e-7. Below -87 the result is 0; above 88 it stays at e^88; NaN stays NaN.
DYNO_INLINE vf exp(vf x) {
  const vf clamped = min(broadcast(88.0f), max(broadcast(-87.0f), x));
  // n = round(x / ln 2) by adding a magic number; r = x - n ln 2 in two pieces; a polynomial for e^r on |r| <= 0.35.
  const vf magic = broadcast(12582912.0f);  // 1.5 * 2^23
  const vf shifted = clamped * broadcast(1.44269504088896341f) + magic;
  const vf n = shifted - magic;
  vf r = clamped - n * broadcast(0.693145751953125f);
  r = r - n * broadcast(1.42860677e-6f);
  vf p = broadcast(1.9875691500e-4f);
  p = p * r + broadcast(1.3981999507e-3f);
  p = p * r + broadcast(8.3334519073e-3f);
  p = p * r + broadcast(4.1665795894e-2f);
  p = p * r + broadcast(1.6666665459e-1f);
  p = p * r + broadcast(5.0000001201e-1f);
  p = p * (r * r) + r + broadcast(1.0f);
  // The low bits of `shifted` are n. Unsigned, because the sum of NaN's bits wraps.
  const vu exponent = reinterpret_cast<vu>(shifted) << 23;
  const vf result = reinterpret_cast<vf>(reinterpret_cast<vu>(p) + exponent);
  const vf kept = x == x ? result : x;  // the addition above can turn a NaN into a number
  return x < broadcast(-87.0f) ? vf{} : kept;
}

// tanh x with a relative error of about 2e-7: a polynomial near 0, where 1 - 2/(e^2x + 1) would cancel.
DYNO_INLINE vf tanh(vf x) {
  const vf e = exp(x + x);
  const vf far = broadcast(1.0f) - broadcast(2.0f) / (e + broadcast(1.0f));
  const vf z = x * x;
  vf p = broadcast(-5.70498872745e-3f);
  p = p * z + broadcast(2.06390887954e-2f);
  p = p * z + broadcast(-5.37397155531e-2f);
  p = p * z + broadcast(1.33314422036e-1f);
  p = p * z + broadcast(-3.33332819422e-1f);
  const vf near = p * z * x + x;
  return z < broadcast(0.390625f) ? near : far;
}

// ---- 8-bit integers ------------------------------------------------------------------------------------------------
// Uses intrinsics, because gcc 12 splits vectors of these types into elements.

DYNO_INLINE vf widen_i8(vb x) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(x))));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_cvtsi64_si128(reinterpret_cast<int64_t>(x));
  return reinterpret_cast<vf>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
#else
  return __builtin_convertvector(__builtin_convertvector(x, vi), vf);
#endif
}

// The low eight bits of each.
DYNO_INLINE vb narrow_i8(vi x) {
#if defined(__AVX512F__)
  return reinterpret_cast<vb>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
#elif defined(__AVX2__)
  const __m256i order = _mm256_broadcastsi128_si256(_mm_cvtsi32_si128(0x0c080400));
  const __m256i bytes = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(x), order);
  const __m256i joined = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
  return reinterpret_cast<vb>(_mm_cvtsi128_si64(_mm256_castsi256_si128(joined)));
#else
  return __builtin_convertvector(x, vb);
#endif
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------------

DYNO_INLINE vf widen_f16(vh h) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(h)));
#elif defined(__F16C__)
  return reinterpret_cast<vf>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(h)));
#else
  // Exponent and mantissa shifted into place are exactly the value times 2^-112, also for subnormals.
  const vu bits = __builtin_convertvector(h, vu);
  const vu magnitude = bits & 0x7fffu;
  const vf scaled = reinterpret_cast<vf>(magnitude << 13) * broadcast(0x1p112f);
  const vu special = reinterpret_cast<vu>(magnitude >= 0x7c00u) & 0x7f800000u;
  return reinterpret_cast<vf>(reinterpret_cast<vu>(scaled) | special | ((bits & 0x8000u) << 16));
#endif
}

DYNO_INLINE vf widen_bf16(vh h) { return reinterpret_cast<vf>(__builtin_convertvector(h, vu) << 16); }

// Round to nearest even; NaN stays NaN.
DYNO_INLINE vh narrow_f16(vf x) {
#if defined(__AVX512F__)
  return reinterpret_cast<vh>(
      _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return reinterpret_cast<vh>(_mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
#else
  const vu bits = reinterpret_cast<vu>(x);
  const vu sign = (bits >> 16) & 0x8000u;
  const vu magnitude = bits & 0x7fffffffu;
  const vu normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Adding 0.5 aligns the mantissa so that its last bit is f16's smallest subnormal.
  const vu subnormal = reinterpret_cast<vu>(reinterpret_cast<vf>(magnitude) + broadcast(0.5f)) - 0x3f000000u;
  vu half = magnitude < 0x38800000u ? subnormal : normal;
  const vu infinity = vu{} + 0x7c00u;
  half = magnitude >= 0x477ff000u ? infinity : half;
  half = magnitude > 0x7f800000u ? (vu{} + 0x7e00u) : half;
  return __builtin_convertvector(half | sign, vh);
#endif
}

DYNO_INLINE vh narrow_bf16(vf x) {
  const vu bits = reinterpret_cast<vu>(x);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const vu quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded, vh);
}

// One half in every lane.
DYNO_INLINE vf broadcast_f16(uint16_t h) {
#if defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(h))));
#elif defined(__F16C__)
  return reinterpret_cast<vf>(_mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(h))));
#else
  return broadcast(widen_f16(vh{h})[0]);
#endif
}

DYNO_INLINE float f16_to_f32(uint16_t h) { return widen_f16(vh{h})[0]; }
DYNO_INLINE uint16_t f32_to_f16(float x) { return narrow_f16(vf{x})[0]; }

}  // namespace DYNO_KERNEL_NAMESPACE
