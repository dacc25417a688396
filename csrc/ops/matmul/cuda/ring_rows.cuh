// Converts the rows of x of `ring` to f16, or to pairs of bytes, in shared memory in the reading order of the lanes.
#pragma once

#include "device/dependent.cuh"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/row_codes.cuh"
#include "ops/matmul/cuda/stream_rows.cuh"

namespace dyno::ops::cuda {

// Writes slices (256 values) of the rows of x as f16 to `halves`, in the order in which a lane reads operand B: step
// pair, t, step, register. Also writes the sums of each 16 values and the inverse of a slice's scale. Returns the sum
// of squares of the values that this warp read.
//
// bytes: values are 16-bit numbers instead, 256·h + l with signed bytes h and l. For block i of 32 values: first all
// h, then all l; each in the order t, step, register of B (k = 2·t and 2·t + 1 of a step, then k + 8), 4 bytes in
// total. Sums are integers; the four blocks of 16 for a lane's t are adjacent.
//
// units: RowBytes (row_codes.cuh) for each 128 values: b of each lane, the sums of each t, and the scale.
//
// …_of_pairs: the order within four bytes of two steps is that of RowUnit::kPairs, for mxfp4.
enum class RingForm : uint8_t { halves, bytes, bytes_of_pairs, units, units_of_pairs };
constexpr RingForm ring_form(DType type, DType other) {
  if (type != other || !rings_in_bytes(type)) return RingForm::halves;
  return gpu_format(type).codebook == GpuCodebook::mxfp4 ? RingForm::bytes_of_pairs : RingForm::bytes;
}
inline constexpr int kChunkUnits = kChunkTiles / kUnitTiles;
template <RingForm kForm>
struct RingRows {
  const Problem& p;
  const RingShape& shape;
  uint8_t* shared;

  // Calls loaded() after its first loads were issued.
  template <typename Loaded>
  __device__ __forceinline__ float convert(int warp, int warps, int lane, Loaded&& loaded) const {
    if constexpr (kForm == RingForm::units || kForm == RingForm::units_of_pairs) {
      return convert_units(warp, warps, lane, loaded);
    } else {
      return convert_slices(warp, warps, lane, loaded);
    }
  }

  // Reads the bytes of unit `unit` of all rows.
  __device__ __forceinline__ RowBytes read(int unit, int lane) const {
    const uint2 b = *reinterpret_cast<const uint2*>(shared + shape.memory.halves + unit * kUnitK * 2 + lane * 8);
    const uint2 sums = *reinterpret_cast<const uint2*>(shared + shape.memory.sums + (unit * 4 + (lane & 3)) * 8);
    return {{b.x, b.y},
            {static_cast<int32_t>(sums.x), static_cast<int32_t>(sums.y)},
            reinterpret_cast<const float*>(shared + shape.memory.scales)[unit]};
  }

 private:
  template <typename Loaded>
  __device__ __forceinline__ float convert_units(int warp, int warps, int lane, Loaded&& loaded) const {
    constexpr int kAtOnce = 4;  // units whose loads are in flight
    const int of_row = shape.chunks * kChunkUnits, units = shape.x_rows * of_row;
    float squares = 0;
    RowValues norm[kAtOnce];
    const auto load_norm = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (p.norm != nullptr) norm[i].load(p.norm, first + i * warps, p.k, lane);
      }
    };
    load_norm(warp);  // a weight, so it may be read before earlier launches end
    device::wait_for_previous();
    if (p.grouping == Grouping::experts) device::let_next_start();  // as in stream_row.cuh
    int first = warp;
    do {
      if (first > warp) load_norm(first);
      RowValues values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = first + i * warps, row = unit / of_row;
        if (unit >= units) continue;
        values[i].load(reinterpret_cast<const float*>(p.x + row * p.x_stride), unit - row * of_row, p.k, lane);
      }
      if (first == warp) loaded();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = first + i * warps;
        if (unit >= units) continue;
        squares += values[i].squares();
        if (p.norm != nullptr) values[i].multiply(norm[i]);
        constexpr bool kPairs = kForm == RingForm::units_of_pairs;
        const RowBytes bytes = values[i].template bytes<!kPairs, kPairs>(lane);
        *reinterpret_cast<uint2*>(shared + shape.memory.halves + unit * kUnitK * 2 + lane * 8) =
            make_uint2(bytes.b[0], bytes.b[1]);
        if (lane < 4) {
          *reinterpret_cast<uint2*>(shared + shape.memory.sums + (unit * 4 + lane) * 8) =
              make_uint2(static_cast<uint32_t>(bytes.sums[0]), static_cast<uint32_t>(bytes.sums[1]));
        }
        if (lane == 0) reinterpret_cast<float*>(shared + shape.memory.scales)[unit] = bytes.back;
      }
      first += warps * kAtOnce;
    } while (first < units);
    return 0.5f * device::warp_sum(squares);  // two lanes have counted each square
  }

  // Halves and bytes.
  template <typename Loaded>
  __device__ __forceinline__ float convert_slices(int warp, int warps, int lane, Loaded&& loaded) const {
    constexpr int kAtOnce = 4;  // slices whose loads are in flight
    const int slices = shape.x_rows * shape.chunks;
    float squares = 0;
    float4 norm[kAtOnce][2];
    const auto load_norm = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (first + i * warps) * kChunkK + half * 128 + lane * 4;
          norm[i][half] =
              p.norm != nullptr && at < p.k ? *reinterpret_cast<const float4*>(p.norm + at) : make_float4(1, 1, 1, 1);
        }
      }
    };
    load_norm(warp);  // a weight, so it may be read before earlier launches end
    device::wait_for_previous();
    if (p.grouping == Grouping::experts) device::let_next_start();  // as in stream.cuh
    int first = warp;
    do {
      if (first > warp) load_norm(first);
      float4 v[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slice = first + i * warps, row = slice / shape.chunks;
        const auto* x = reinterpret_cast<const float*>(p.x + row * p.x_stride);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = (slice - row * shape.chunks) * kChunkK + half * 128 + lane * 4;
          v[i][half] = make_float4(0, 0, 0, 0);
          if (slice < slices && at < p.k) {
            const float2 low = *reinterpret_cast<const float2*>(x + at);
            const float2 high = *reinterpret_cast<const float2*>(x + at + 2);
            v[i][half] = make_float4(low.x, low.y, high.x, high.y);
          }
        }
      }
      if (first == warp) loaded();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int slice = first + i * warps;
        if (slice >= slices) continue;
        if constexpr (kForm != RingForm::halves) {
          put_bytes(slice, v[i], norm[i], lane, squares);
        } else {
          put(slice, v[i], norm[i], lane, squares);
        }
      }
      first += warps * kAtOnce;
    } while (first < slices);
    return device::warp_sum(squares);
  }

  __device__ __forceinline__ void put_bytes(int slice, float4 (&v)[2], const float4 (&norm)[2], int lane,
                                            float& squares) const {
    float largest = 0, none = 0;  // none: 0 if all values are finite, otherwise NaN
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4& q = v[half];
      squares += (q.x * q.x + q.y * q.y) + (q.z * q.z + q.w * q.w);
      q = make_float4(q.x * norm[half].x, q.y * norm[half].y, q.z * norm[half].z, q.w * norm[half].w);
      largest = fmaxf(fmaxf(fmaxf(largest, fabsf(q.x)), fmaxf(fabsf(q.y), fabsf(q.z))), fabsf(q.w));
      none += ((q.x - q.x) + (q.y - q.y)) + ((q.z - q.z) + (q.w - q.w));
    }
    // The largest number stays below 2^15 minus 128, so that h fits a signed byte.
    constexpr float kUp = 32.0f, kRoom = 1.004f, kMost = 3.0e38f;
    const float most = device::warp_max_positive(none == 0.0f ? largest : __uint_as_float(0x7f800000u)) * kRoom;
    const float back = row_scale(most);
    const float factor = inverse_scale(back);
    auto* bytes = reinterpret_cast<uint16_t*>(shared + shape.memory.halves + slice * kChunkK * 2);
    auto* sums = reinterpret_cast<int32_t*>(shared + shape.memory.sums) + slice * (kChunkK / 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The low bits of such a float are an integer: here the number plus 128.
      constexpr float kMagic = 12582912.0f + 128.0f;
      const auto integer = [&](float value) { return __float_as_uint(value * factor * kUp + kMagic); };
      const uint32_t n[4] = {integer(v[half].x), integer(v[half].y), integer(v[half].z), integer(v[half].w)};
      const int step = half * 8 + (lane >> 2), quad = lane & 3;
      [[maybe_unused]] const int at = (step >> 1) * 32 + (quad & 1) * 8 + (step & 1) * 2 + (quad >> 1);  // in two bytes
      if constexpr (kForm == RingForm::bytes_of_pairs) {
        auto* to =
            reinterpret_cast<uint8_t*>(bytes) + (step >> 1) * 64 + (quad & 1) * 16 + (quad >> 1) * 2 + (step & 1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[i / 2 * 8 + i % 2 * 4] = static_cast<uint8_t>(n[i] >> 8);
          to[i / 2 * 8 + i % 2 * 4 + 32] = static_cast<uint8_t>(n[i] ^ 0x80u);
        }
      } else {
        bytes[at] = static_cast<uint16_t>(__byte_perm(n[0], n[1], 0x51));
        bytes[at + 4] = static_cast<uint16_t>(__byte_perm(n[2], n[3], 0x51));
        bytes[at + 16] = static_cast<uint16_t>(__byte_perm(n[0], n[1], 0x40) ^ 0x8080u);
        bytes[at + 20] = static_cast<uint16_t>(__byte_perm(n[2], n[3], 0x40) ^ 0x8080u);
      }
      uint32_t sum = n[0] + n[1] + n[2] + n[3];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (quad == 0) sums[(step & 3) * 4 + (step >> 2)] = static_cast<int32_t>(sum - 16 * 0x4b400080u);
    }
    // Integers have no NaN, so the scale becomes NaN if any value is not finite.
    if (lane == 0) {
      reinterpret_cast<float*>(shared + shape.memory.scales)[slice] =
          most <= kMost ? back / kUp : __uint_as_float(0x7fc00000u);
    }
  }

  __device__ __forceinline__ void put(int slice, float4 (&v)[2], const float4 (&norm)[2], int lane,
                                      float& squares) const {
    float largest = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4& q = v[half];
      squares += (q.x * q.x + q.y * q.y) + (q.z * q.z + q.w * q.w);
      q = make_float4(q.x * norm[half].x, q.y * norm[half].y, q.z * norm[half].z, q.w * norm[half].w);
      largest = fmaxf(fmaxf(fmaxf(largest, fabsf(q.x)), fmaxf(fabsf(q.y), fabsf(q.z))), fabsf(q.w));
    }
    const float back = row_scale(device::warp_max_positive(largest)), factor = inverse_scale(back);
    auto* halves = reinterpret_cast<uint32_t*>(shared + shape.memory.halves + slice * kChunkK * 2);
    auto* sums = reinterpret_cast<float*>(shared + shape.memory.sums) + slice * (kChunkK / 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 q = v[half];
      const uint32_t low = device::pack_half2(q.x * factor, q.y * factor);
      const uint32_t high = device::pack_half2(q.z * factor, q.w * factor);
      const int step = half * 8 + (lane >> 2), quad = lane & 3;
      const int at = ((step >> 1) * 4 + (quad & 1) * 2) * 4 + (step & 1) * 2 + (quad >> 1);
      halves[at] = low;
      halves[at + 4] = high;
      const float2 a = __half22float2(device::as_half2(low)), b = __half22float2(device::as_half2(high));
      float sum = (a.x + a.y) + (b.x + b.y);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (quad == 0) sums[step] = sum;
    }
    if (lane == 0) reinterpret_cast<float*>(shared + shape.memory.scales)[slice] = back;
  }
};

}  // namespace dyno::ops::cuda
