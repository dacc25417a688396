// Weight types that a GPU reads as another type. The values are exactly the same: either the same scales with integers
// that the other type can represent, or floats that can represent the products. The other type has more bits per weight
// than the file.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace dyno {

// The type with GPU kernels that represents exactly the values of `type`. Returns `type` itself if it has GPU kernels,
// or is not a weight type.
DType gpu_type(DType type);

// Writes `rows` consecutive rows of `k` values as rows of gpu_type(type). `k` must be a multiple of the blocks of both
// types. Throws UnsupportedError for a type that gpu_type() does not change.
void recode_rows(DType type, const std::byte* in, std::byte* out, int64_t rows, int64_t k);

}  // namespace dyno
