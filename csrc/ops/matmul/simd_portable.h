// simd.h without intrinsics: arrays and loops that the compiler may vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace DYNO_KERNEL_NAMESPACE {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};

inline constexpr bool kSignedBytes = false;
inline constexpr int kMaxAccumulators = 4;
inline constexpr int kMaxMatvec = 2;

// Not inlined, because inlined loops over arrays multiply the code size.
#define DYNO_OUTLINE __attribute__((noinline))

#define DYNO_LANES for (int i = 0; i < 16; ++i)

inline F f_set1(float x) {
  F r;
  DYNO_LANES r.v[i] = x;
  return r;
}
inline F f_zero() { return f_set1(0.0f); }
inline F f_load(const float* p) {
  F r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void f_store(float* p, const F& x) { std::memcpy(p, x.v, sizeof x.v); }
inline F f_load_n(const float* p, int n) {
  F r = f_zero();
  std::memcpy(r.v, p, static_cast<size_t>(n) * sizeof(float));
  return r;
}
inline void f_store_n(float* p, const F& x, int n) { std::memcpy(p, x.v, static_cast<size_t>(n) * sizeof(float)); }
inline F f_add(F a, const F& b) {
  DYNO_LANES a.v[i] += b.v[i];
  return a;
}
inline F f_sub(F a, const F& b) {
  DYNO_LANES a.v[i] -= b.v[i];
  return a;
}
inline F f_mul(F a, const F& b) {
  DYNO_LANES a.v[i] *= b.v[i];
  return a;
}
inline F f_div(F a, const F& b) {
  DYNO_LANES a.v[i] /= b.v[i];
  return a;
}
// Returns the second operand if either is NaN.
inline F f_min(F a, const F& b) {
  DYNO_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline F f_max(F a, const F& b) {
  DYNO_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
DYNO_OUTLINE inline F f_fma(F a, const F& b, const F& c) {
  DYNO_LANES a.v[i] = a.v[i] * b.v[i] + c.v[i];
  return a;
}
inline F f_fnma(F a, const F& b, const F& c) {
  DYNO_LANES a.v[i] = c.v[i] - a.v[i] * b.v[i];
  return a;
}
// Rounds to nearest even for |x| < 2^22, by the rounding of an addition.
inline F f_round(F a) {
  DYNO_LANES {
    volatile float shifted = a.v[i] + 12582912.0f;
    a.v[i] = shifted - 12582912.0f;
  }
  return a;
}
// A number outside int32_t (NaN, infinities) becomes the integer that x86 converts it to; the result is 1.
inline F f_exp2i(F n) {
  DYNO_LANES {
    const bool fits = n.v[i] >= -0x1p31f && n.v[i] < 0x1p31f;
    const int32_t whole = fits ? static_cast<int32_t>(n.v[i]) : std::numeric_limits<int32_t>::min();
    const uint32_t bits = (static_cast<uint32_t>(whole) + 127u) << 23;
    std::memcpy(&n.v[i], &bits, sizeof bits);
  }
  return n;
}
inline F f_from_i(const I& x) {
  F r;
  DYNO_LANES r.v[i] = static_cast<float>(x.v[i]);
  return r;
}
inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    const float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
  }
  float r;
  std::memcpy(&r, &bits, sizeof r);
  return r;
}
DYNO_OUTLINE inline F f_from_f16(const void* p) {
  uint16_t h[16];
  std::memcpy(h, p, sizeof h);
  F r;
  DYNO_LANES r.v[i] = f16_to_f32(h[i]);
  return r;
}
inline F f_from_bf16(const void* p) {
  uint16_t h[16];
  std::memcpy(h, p, sizeof h);
  F r;
  DYNO_LANES {
    const uint32_t bits = static_cast<uint32_t>(h[i]) << 16;
    std::memcpy(&r.v[i], &bits, sizeof bits);
  }
  return r;
}
inline F f_from_u8(const void* p) {
  F r;
  DYNO_LANES r.v[i] = static_cast<float>(static_cast<const uint8_t*>(p)[i]);
  return r;
}
inline F f_from_s8(const void* p) {
  F r;
  DYNO_LANES r.v[i] = static_cast<float>(static_cast<const int8_t*>(p)[i]);
  return r;
}
inline F f_from_low_nibble(const void* p) {
  F r;
  DYNO_LANES r.v[i] = static_cast<float>(static_cast<const uint8_t*>(p)[i] & 15);
  return r;
}
inline F f_from_high_nibble(const void* p) {
  F r;
  DYNO_LANES r.v[i] = static_cast<float>(static_cast<const uint8_t*>(p)[i] >> 4);
  return r;
}
// 2^(e - 128) of E8M0 bytes, including subnormal results.
inline F f_from_e8m0_half(const void* p) {
  F r;
  DYNO_LANES {
    const uint32_t e = static_cast<const uint8_t*>(p)[i];
    const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    std::memcpy(&r.v[i], &bits, sizeof bits);
  }
  return r;
}
// Every version uses the same tree.
inline float f_sum(const F& x) {
  float t[8];
  for (int i = 0; i < 8; ++i) t[i] = x.v[i] + x.v[i + 8];
  for (int i = 0; i < 4; ++i) t[i] += t[i + 4];
  for (int i = 0; i < 2; ++i) t[i] += t[i + 2];
  return t[0] + t[1];
}

inline I i_set1(int32_t x) {
  I r;
  DYNO_LANES r.v[i] = x;
  return r;
}
DYNO_OUTLINE inline B b_load(const void* p) {
  B r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void b_store(void* p, const B& x) { std::memcpy(p, x.v, sizeof x.v); }
inline B b_set1(int x) {
  B r;
  std::memset(r.v, x, sizeof r.v);
  return r;
}
DYNO_OUTLINE inline B b_and(B a, const B& b) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] & b.v[i]);
  return a;
}
DYNO_OUTLINE inline B b_xor(B a, const B& b) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] ^ b.v[i]);
  return a;
}
DYNO_OUTLINE inline B b_or(B a, const B& b) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] | b.v[i]);
  return a;
}
// Bits that other versions move across byte boundaries are lost here: mask afterwards.
template <int N>
DYNO_OUTLINE inline B b_shr(B a) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] >> N);
  return a;
}
template <int N>
DYNO_OUTLINE inline B b_shl(B a) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] << N);
  return a;
}
struct Lut {
  uint8_t v[16];
};
inline Lut lut_load(const uint8_t* p16) {
  Lut t;
  std::memcpy(t.v, p16, 16);
  return t;
}
DYNO_OUTLINE inline B b_lut(const Lut& t, B index) {
  for (int i = 0; i < 64; ++i) index.v[i] = t.v[index.v[i] & 15];
  return index;
}
// Entries 0-15 of `low`, 16-31 of `high`.
DYNO_OUTLINE inline B b_lut32(const Lut& low, const Lut& high, B index) {
  for (int i = 0; i < 64; ++i) {
    const uint8_t at = index.v[i];
    index.v[i] = (at & 16) != 0 ? high.v[at & 15] : low.v[at & 15];
  }
  return index;
}
DYNO_OUTLINE inline B b_add(B a, const B& b) {
  for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] + b.v[i]);
  return a;
}
// `bytes` in the rows whose bit is set, zeros in other rows.
DYNO_OUTLINE inline B b_rows(uint16_t rows, uint32_t bytes) {
  B r;
  DYNO_LANES {
    const uint32_t x = (rows >> i & 1) != 0 ? bytes : 0u;
    std::memcpy(r.v + 4 * i, &x, 4);
  }
  return r;
}

struct Activation4 {
  int8_t v[4];
};
inline Activation4 act_broadcast(const void* p) {
  Activation4 a;
  std::memcpy(a.v, p, 4);
  return a;
}
template <int kWiden>
struct Weight4 {
  B w;
  explicit Weight4(const B& x) : w(x) {}
};
template <int kWiden, int kSteps>
struct Dot {
  I acc;
  void init(int32_t x) { acc = i_set1(x); }
  void zero() { acc = i_set1(0); }
  template <int kStep>
  void step(const Weight4<kWiden>& w, const Activation4& a) {
    add(w, a);
  }
  DYNO_OUTLINE void add(const Weight4<kWiden>& w, const Activation4& a) {
    DYNO_LANES {
      const uint8_t* u = w.w.v + 4 * i;
      acc.v[i] += u[0] * a.v[0] + u[1] * a.v[1] + u[2] * a.v[2] + u[3] * a.v[3];
    }
  }
  const I& sum() const { return acc; }
};

// 16 rows of 32 bytes -> 8 tiles of 16 rows x 4 bytes.
struct Row32 {
  uint8_t v[32];
};
DYNO_OUTLINE inline void transpose_rows(const Row32 src[16], B out[8]) {
  for (int j = 0; j < 8; ++j) {
    DYNO_LANES std::memcpy(out[j].v + 4 * i, src[i].v + 4 * j, 4);
  }
}

#undef DYNO_LANES

}  // namespace DYNO_KERNEL_NAMESPACE
