// How the engine uses tensors of a type, as text for the inspection of files.
#pragma once

#include <string_view>

#include "core/dtype.h"

namespace dyno {

std::string_view type_support(DType type);

// Includes the bytes that a row has before its blocks, for rows of `k` values.
double bits_per_weight(DType type, int64_t k);

}  // namespace dyno
