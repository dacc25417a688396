// The interleaved types of ik_llama.cpp: 4, 8 or 16 rows in one unit. At load, units become rows of the plain type,
// which has the same codes and scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace dyno {

// Writes the rows of one unit, `k` values each, one after the other: dtype_info(type).rows rows of
// row_bytes(plain, k) bytes. Throws UnsupportedError for a type that is not interleaved.
void take_apart(DType type, const std::byte* unit, std::byte* rows, int64_t k);

}  // namespace dyno
