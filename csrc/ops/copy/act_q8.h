// Quantised activations: the format of a token's row in products with quantised weights.
//
// A row of k values (k a multiple of 32) consists of, in this order:
//   int8  q[k]          values rounded to nearest, in [-127, 127]
//   f32   d[k / 32]     x ≈ d * q, d = max|x| / 127 over 32 values
//   int16 sum[k / 16]   sums of q over 16 values, for weights with an offset
// padded to a multiple of 64 bytes, so that every row starts aligned.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dyno::ops {

inline constexpr int64_t kActBlock = 32;

inline size_t act_q8_scale_offset(int64_t k) { return static_cast<size_t>(k); }
inline size_t act_q8_sum_offset(int64_t k) { return static_cast<size_t>(k + k / 32 * 4); }
inline size_t act_q8_row_bytes(int64_t k) { return (static_cast<size_t>(k + k / 32 * 4 + k / 16 * 2) + 63) / 64 * 64; }

}  // namespace dyno::ops
