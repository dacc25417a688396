// CUDA's halves on the CPU.
#pragma once

#include <cuda_runtime.h>

struct __half {
  _Float16 v;
};
struct __half2 {
  _Float16 x, y;
};

inline __half __ushort_as_half(unsigned short bits) { return {__builtin_bit_cast(_Float16, bits)}; }
inline __half __float2half_rn(float v) { return {static_cast<_Float16>(v)}; }
inline float __half2float(__half v) { return static_cast<float>(v.v); }
inline __half2 __half2half2(__half v) { return {v.v, v.v}; }
inline __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
inline __half2 __high2half2(__half2 v) { return {v.y, v.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {static_cast<_Float16>(x), static_cast<_Float16>(y)}; }
inline float2 __half22float2(__half2 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline __half2 __hneg2(__half2 v) { return {static_cast<_Float16>(-v.x), static_cast<_Float16>(-v.y)}; }
// Sums and products of two halves are exact in float64 and rounded once.
inline __half2 __hsub2(__half2 a, __half2 b) {
  return {static_cast<_Float16>(double{a.x} - double{b.x}), static_cast<_Float16>(double{a.y} - double{b.y})};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
  return {static_cast<_Float16>(double{a.x} * double{b.x}), static_cast<_Float16>(double{a.y} * double{b.y})};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {static_cast<_Float16>(double{a.x} * double{b.x} + double{c.x}),
          static_cast<_Float16>(double{a.y} * double{b.y} + double{c.y})};
}
