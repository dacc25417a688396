// Weight types that a GPU reads as another type. All values are the same numbers: the same scales, and integers that
// the other type's codes can hold; or floats that hold the products. It has more bits a weight than the file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace dyno {

// The type with kernels for a GPU that holds exactly the values of `type`. `type` itself if it has such kernels, and
// if it is no weight type.
DType gpu_type(DType type);

// Writes `rows` rows of `k` values, one after the other, as rows of gpu_type(type). Throws UnsupportedError for a type
// that gpu_type() does not change. `k` is a multiple of the blocks of both types.
void recode_rows(DType type, const std::byte* in, std::byte* out, int64_t rows, int64_t k);

}  // namespace dyno
