// Byte rows: rows of x, converted once for all kernels that multiply single rows by bytes
// (ops/matmul/cuda/row_bytes.cuh). The floats stay beside them for other kernels.
//
// A row has units of 128 values, an even number of them; the last ones may have zeros beyond k. For each unit, lane
// number l of a warp has 16 bytes: two words of its operand, the sum of the 32 numbers with index l % 4 as an int32,
// and the scale of the unit as a float. After all units follow, for each unit, its eight sums of 16 numbers.
#pragma once

#include <cstdint>

namespace dyno::ops {

inline constexpr int kByteUnit = 128;                     // values
inline constexpr int kByteUnitLanes = 32 * 16;            // bytes of the lanes of a unit
inline constexpr int kByteUnitSums = kByteUnit / 16 * 4;  // bytes of its sums of 16 numbers

constexpr int64_t byte_row_units(int64_t k) { return (k + 2 * kByteUnit - 1) / (2 * kByteUnit) * 2; }
constexpr int64_t byte_row_bytes(int64_t k) { return byte_row_units(k) * (kByteUnitLanes + kByteUnitSums); }

}  // namespace dyno::ops
