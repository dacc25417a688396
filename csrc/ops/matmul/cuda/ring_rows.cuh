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
// units: RowBytes (row_codes.cuh) for each 128 values instead: b of each lane, the sums of each t, and the scale.
enum class RingForm : uint8_t { halves, units };
constexpr RingForm ring_form(DType type, DType other) {
  return type == other && rings_in_units(type) ? RingForm::units : RingForm::halves;
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
    if constexpr (kForm == RingForm::units) {
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
    const RowLane of_lane(lane);
    const bool converted = p.x_bytes != nullptr;
    const int of_row = shape.chunks * kChunkUnits, units = shape.x_rows * of_row;
    float squares = 0;
    RowValues norm[kAtOnce];
    const auto load_norm = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (p.norm != nullptr) norm[i].load(p.norm, first + i * warps, p.k, RowValues::first_k(lane));
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
        if (converted) {
          values[i].template load_bytes<16>(p.x_bytes + row * byte_row_bytes(p.k), unit - row * of_row, of_row, lane);
        } else {
          values[i].load(reinterpret_cast<const float*>(p.x + row * p.x_stride), unit - row * of_row, p.k,
                         RowValues::first_k(lane));
        }
      }
      if (first == warp) loaded();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int unit = first + i * warps;
        if (unit >= units) continue;
        RowBytes bytes;
        if (converted) {
          bytes = values[i].template converted<16>();
        } else {
          squares += values[i].squares();
          if (p.norm != nullptr) values[i].multiply(norm[i]);
          bytes = values[i].template bytes<16>(of_lane);
        }
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
        put(slice, v[i], norm[i], lane, squares);
      }
      first += warps * kAtOnce;
    } while (first < slices);
    return device::warp_sum(squares);
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
