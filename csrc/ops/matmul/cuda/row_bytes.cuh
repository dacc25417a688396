// Rows of x as pairs of signed bytes, in the order in which the operands of row_codes.cuh have them: converted by the
// warp that multiplies them, or by an earlier launch (byte_rows.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/arithmetic.cuh"
#include "device/ptx.cuh"
#include "device/reduce.cuh"
#include "ops/matmul/byte_rows.h"

namespace dyno::ops::cuda {

inline constexpr int kUnitK = 128;  // k of a unit, two tiles
static_assert(kUnitK == kByteUnit);

// Bytes of x of a lane: of its column, and of two steps of the 32 k that belong to the column.
struct RowBytes {
  uint32_t b[2];
  int32_t sums[2];  // of the numbers of the 32 k with number t, or of each of their two steps
  float back;       // x = back · number; NaN if a value is not finite
};

// The scale of 128 values, of which `most` has the bits of the largest magnitude.
struct RowScale {
  float back, factor;  // value = back · number; the inverse
  __device__ __forceinline__ explicit RowScale(uint32_t most) {
    // Bits of a float that is not negative have the order of the floats. The largest number stays below 2^15 - 128, so
    // that h fits a signed byte. A value of 2^15 - 128.5 or more would be rounded to that, so its mantissa, at least
    // 0x7eff00, carries into the exponent here.
    constexpr uint32_t kRoom = 0x800000 - 0x7eff00, kInfinity = 0x7f800000;
    const uint32_t bits = (max((most + kRoom) >> 23, 15u) - 14u) << 23;
    factor = __uint_as_float(0x7f000000u - bits);
    // Integers have no NaN, so the scale becomes NaN if any value is not finite.
    back = __uint_as_float(most < kInfinity ? bits : 0x7fc00000u);
  }
};

// How a lane makes its bytes, in registers: computed again for each unit, it would take a tenth of the conversion.
struct RowLane {
  uint32_t which;  // bytes of two integers: h or l, which the columns of lanes 4 to 7 of 8 have
  uint32_t magic;  // bits of a float; the low bits of a value plus it are an integer: the number, for h plus 128
  __device__ __forceinline__ explicit RowLane(int lane) {
    const bool low = (lane & 4) != 0;
    which = low ? 0x40u : 0x51u, magic = low ? 0x4b400000u : 0x4b400080u;
    asm volatile("" : "+r"(which), "+r"(magic));
  }
};

// The values of x that a lane converts: two pairs of each step, 8 k apart.
struct RowValues {
  float2 v[4];

  // Values [128·unit, 128·unit + 128) of a row with k values, a multiple of 32, with zeros beyond. first: first_k().
  __device__ __forceinline__ void load(const float* row, int unit, int k, int first) {
    const int at = unit * kUnitK + first;
    const auto* pairs = reinterpret_cast<const float2*>(row + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = at < k ? pairs[4 * i] : make_float2(0, 0);
  }
  // A lane's first k of a unit.
  static __device__ __forceinline__ int first_k(int lane) { return lane / 8 * 32 + lane % 4 * 2; }
  // The sum of the squares of the values of this lane. Two lanes have the same values.
  __device__ __forceinline__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += v[i].x * v[i].x + v[i].y * v[i].y;
    return sum;
  }
  __device__ __forceinline__ void multiply(const RowValues& by) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i].x *= by.v[i].x, v[i].y *= by.v[i].y;
  }
  // kSumsOf: 32 or 16 values, or 0 for no sums.
  template <int kSumsOf>
  __device__ __forceinline__ RowBytes bytes(const RowLane& of) const {
    float largest = 0;  // NaN if a value is
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      largest = device::max_or_nan(device::max_or_nan(largest, fabsf(v[i].x)), fabsf(v[i].y));
    }
    const RowScale scale(device::warp_max_unsigned(__float_as_uint(largest)));
    RowBytes out;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const auto integer = [&](float value) {
        return __float_as_uint(value * scale.factor + __uint_as_float(of.magic));
      };
      const float2 a = v[2 * step], b = v[2 * step + 1];
      const uint32_t first = __byte_perm(integer(a.x), integer(b.x), of.which);
      const uint32_t second = __byte_perm(integer(a.y), integer(b.y), of.which);
      out.b[step] = __byte_perm(first, second, 0x5410);
    }
    constexpr uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    int32_t sums[2][4] = {};
    if constexpr (kSumsOf != 0) device::mma_u8s8(sums[0], kOnes, out.b[0], kSumsOf == 16 ? 0u : out.b[1]);
    if constexpr (kSumsOf == 16) device::mma_u8s8(sums[1], kOnes, 0u, out.b[1]);
#pragma unroll
    for (int set = 0; set < 2; ++set) out.sums[set] = sums[set][0] * 256 + sums[set][1];
    out.back = scale.back;
    return out;
  }

  // The same of a byte row, which an earlier launch has written: loads what converted() returns.
  template <int kSumsOf>
  __device__ __forceinline__ void load_bytes(const uint8_t* row, int unit, int units, int lane) {
    const float4 of_lane = *reinterpret_cast<const float4*>(row + unit * kByteUnitLanes + lane * 16);
    v[0] = make_float2(of_lane.x, of_lane.y), v[1] = make_float2(of_lane.z, of_lane.w);
    if constexpr (kSumsOf == 16) {
      v[2] = *reinterpret_cast<const float2*>(row + units * kByteUnitLanes + unit * kByteUnitSums + lane % 4 * 8);
    }
  }
  template <int kSumsOf>
  __device__ __forceinline__ RowBytes converted() const {
    RowBytes out;
    out.b[0] = __float_as_uint(v[0].x), out.b[1] = __float_as_uint(v[0].y);
    out.sums[0] = static_cast<int32_t>(__float_as_uint(kSumsOf == 16 ? v[2].x : v[1].x));
    out.sums[1] = kSumsOf == 16 ? static_cast<int32_t>(__float_as_uint(v[2].y)) : 0;
    out.back = v[1].y;
    return out;
  }
};

// Writes unit `unit` of a byte row of `units` units. Lane l has values 4·l … 4·l + 3 of it, with zeros beyond k. All
// lanes call it.
__device__ __forceinline__ void store_byte_unit(uint8_t* row, int units, int unit, const float4& value, int lane) {
  float largest = device::max_or_nan(fabsf(value.x), fabsf(value.y));
  largest = device::max_or_nan(device::max_or_nan(largest, fabsf(value.z)), fabsf(value.w));
  const RowScale scale(device::warp_max_unsigned(__float_as_uint(largest)));
  constexpr uint32_t kMagic = 0x4b400000u;
  uint32_t number[4];  // plus kMagic
  number[0] = __float_as_uint(value.x * scale.factor + __uint_as_float(kMagic));
  number[1] = __float_as_uint(value.y * scale.factor + __uint_as_float(kMagic));
  number[2] = __float_as_uint(value.z * scale.factor + __uint_as_float(kMagic));
  number[3] = __float_as_uint(value.w * scale.factor + __uint_as_float(kMagic));
  auto sum = static_cast<int32_t>(number[0] + number[1] + number[2] + number[3] - 4 * kMagic);
  uint32_t pair[2];  // bytes l, l, h, h of two numbers
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t low = __byte_perm(number[2 * i], number[2 * i + 1], 0x0040u);
    const uint32_t high = __byte_perm(number[2 * i] + 128u, number[2 * i + 1] + 128u, 0x0051u);
    pair[i] = __byte_perm(low, high, 0x5410u);
  }
  // Of a step of 16 values, lanes 0 and 1 of 4 have the first eight and lanes 2 and 3 the others; an operand's word has
  // a pair of both.
  const bool behind = (lane & 2) != 0;
  const uint32_t other = __shfl_xor_sync(device::kFullMask, behind ? pair[0] : pair[1], 2);
  const uint32_t first = behind ? other : pair[0], second = behind ? pair[1] : other;
  const int t = 2 * (lane & 1) + (behind ? 1 : 0), step = lane >> 2 & 1;
  uint8_t* of_unit = row + unit * kByteUnitLanes;
  uint8_t* word = of_unit + (lane / 8 * 8 + t) * 16 + step * 4;
  *reinterpret_cast<uint32_t*>(word) = __byte_perm(first, second, 0x7362u);           // h
  *reinterpret_cast<uint32_t*>(word + 4 * 16) = __byte_perm(first, second, 0x5140u);  // l
  sum += __shfl_xor_sync(device::kFullMask, sum, 1);
  sum += __shfl_xor_sync(device::kFullMask, sum, 2);
  if ((lane & 3) == 0) {
    *reinterpret_cast<int32_t*>(row + units * kByteUnitLanes + unit * kByteUnitSums + lane) = sum;
  }
  sum += __shfl_xor_sync(device::kFullMask, sum, 4);  // of the 32 values of eight lanes
  const int32_t of_column = __shfl_sync(device::kFullMask, sum, lane % 4 * 8);
  *reinterpret_cast<float2*>(of_unit + lane * 16 + 8) =
      make_float2(__uint_as_float(static_cast<uint32_t>(of_column)), scale.back);
}

}  // namespace dyno::ops::cuda
