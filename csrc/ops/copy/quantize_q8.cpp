// Converts f32 rows to int8 blocks of 32 with a scale and sums (act_q8.h).
//
// Every version rounds to nearest even and uses the same d = max|x| / 127, so all instruction sets give the same bytes.
// A block whose largest value is NaN or infinite gets this value as its scale, so that it shows in the result. A block
// of values below 1e-36, whose inverse scale would overflow, becomes zeros.
#include <cstring>

#include "ops/copy/act_q8.h"
#include "ops/copy/kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace DYNO_KERNEL_NAMESPACE {
namespace {

constexpr float kSmallest = 1e-36f;

struct Scales {
  float d;        // stored
  float inverse;  // factor of the values
};

inline Scales scales_of(float largest) {
  const bool finite = largest <= 3.4028234663852886e38f;  // false for NaN
  if (!finite) return {largest, 0.0f};
  if (largest < kSmallest) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

#if defined(__AVX2__)

// The largest bit pattern without sign: for floats this is max|x|, and NaN is above everything.
inline float largest_of(const __m256 v[4]) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i m = _mm256_and_si256(_mm256_castps_si256(v[0]), mask);
  for (int i = 1; i < 4; ++i) m = _mm256_max_epu32(m, _mm256_and_si256(_mm256_castps_si256(v[i]), mask));
  __m128i h = _mm_max_epu32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_max_epu32(h, _mm_shuffle_epi32(h, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(h));
}

inline int sum_of_16(__m256i words) {
  const __m256i pairs = _mm256_madd_epi16(words, _mm256_set1_epi16(1));
  __m128i h = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
  h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1));
  return _mm_cvtsi128_si32(h);
}

inline void quantize_block(const float* x, uint8_t* q, float* d, int16_t sums[2]) {
  __m256 v[4];
  for (int i = 0; i < 4; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
  const Scales s = scales_of(largest_of(v));
  *d = s.d;
  if (s.inverse == 0.0f) {
    std::memset(q, 0, 32);
    sums[0] = sums[1] = 0;
    return;
  }
  const __m256 inverse = _mm256_set1_ps(s.inverse);
  __m256i n[4];
  for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  // packs works within halves, so the quarters are put back in order.
  const __m256i low = _mm256_permute4x64_epi64(_mm256_packs_epi32(n[0], n[1]), 0xd8);
  const __m256i high = _mm256_permute4x64_epi64(_mm256_packs_epi32(n[2], n[3]), 0xd8);
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), bytes);
  sums[0] = static_cast<int16_t>(sum_of_16(low));
  sums[1] = static_cast<int16_t>(sum_of_16(high));
}

#else

inline void quantize_block(const float* x, uint8_t* q, float* d, int16_t sums[2]) {
  uint32_t largest_bits = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffffu;
    if (bits > largest_bits) largest_bits = bits;
  }
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  const Scales s = scales_of(largest);
  *d = s.d;
  if (s.inverse == 0.0f) {
    std::memset(q, 0, 32);
    sums[0] = sums[1] = 0;
    return;
  }
  int sum[2] = {0, 0};
  for (int i = 0; i < 32; ++i) {
    // Adding and subtracting 1.5 * 2^23 rounds to nearest even.
    volatile float shifted = x[i] * s.inverse + 12582912.0f;
    const int value = static_cast<int>(shifted - 12582912.0f);
    q[i] = static_cast<uint8_t>(value);
    sum[i / 16] += value;
  }
  sums[0] = static_cast<int16_t>(sum[0]);
  sums[1] = static_cast<int16_t>(sum[1]);
}

#endif

}  // namespace

void quantize_rows_q8(const CopyArgs& args, int64_t k, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const float* x = args.x + row * args.x_stride;
    uint8_t* out = static_cast<uint8_t*>(args.out) + row * args.out_stride_bytes;
    uint8_t* d = out + k;
    uint8_t* sum = d + k / 32 * 4;
    for (int64_t i = 0; i < k / 32; ++i) {
      float scale;
      int16_t sums[2];
      quantize_block(x + 32 * i, out + 32 * i, &scale, sums);
      std::memcpy(d + 4 * i, &scale, 4);
      std::memcpy(sum + 4 * i, sums, 4);
    }
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
