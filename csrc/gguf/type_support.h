// The engine's use of the tensors of a type, in words: for people who look into a file before they load it.
#pragma once

#include <string_view>

#include "core/dtype.h"

namespace dyno {

std::string_view type_support(DType type);

// With what a row has before its blocks, in rows of `k` values.
double bits_per_weight(DType type, int64_t k);

}  // namespace dyno
