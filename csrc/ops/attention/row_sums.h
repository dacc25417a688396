// Sums over the lanes of several vectors at once, for kernel sources.
#pragma once

#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {

// Number of vectors whose lanes are summed together: the accumulators leave enough registers for the operands.
constexpr int kSums = kLanes == 16 ? 16 : 8;

// The index in v of the vector whose sum becomes out[n].
constexpr int sum_slot(int n) {
#if defined(__AVX512F__)
  return n / 4 + n % 4 * 4;
#elif defined(__AVX2__)
  return n / 4 + n % 4 * 2;
#else
  return n;
#endif
}

// out[n] = horizontal_sum(v[sum_slot(n)]), bit-exact: halves are added pairwise as well, but for two vectors at a time.
DYNO_INLINE void horizontal_sums(const vf (&v)[kSums], float* out) {
#if defined(__AVX512F__)
  const auto lanes = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const auto lane = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  const auto pairs = [](__m512 a, __m512 b) {
    const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  };
  __m512 fours[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const vf* const x = v + 4 * i;
    fours[i] = lane(lanes(reinterpret_cast<__m512>(x[0]), reinterpret_cast<__m512>(x[1])),
                    lanes(reinterpret_cast<__m512>(x[2]), reinterpret_cast<__m512>(x[3])));
  }
  const __m512 a = pairs(fours[0], fours[1]), b = pairs(fours[2], fours[3]);
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)));
#elif defined(__AVX2__)
  const auto lanes = [](vf x, vf y) {
    const auto a = reinterpret_cast<__m256>(x), b = reinterpret_cast<__m256>(y);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto pairs = [](__m256 a, __m256 b) {
    const __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  };
  const __m256 a = pairs(lanes(v[0], v[1]), lanes(v[2], v[3])), b = pairs(lanes(v[4], v[5]), lanes(v[6], v[7]));
  _mm256_storeu_ps(out, _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd)));
#else
  for (int i = 0; i < kSums; ++i) out[i] = horizontal_sum(v[i]);
#endif
}

}  // namespace DYNO_KERNEL_NAMESPACE
