// Kernels of norm, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

// clang-format off
DYNO_DECLARE_KERNELS(
    // Rows [begin, end) of m * rows_per_token rows.
    void norm_rows(const NormArgs& args, int64_t n, int64_t rows_per_token, int64_t begin, int64_t end);
    // The same for desc.centred.
    void layer_norm_rows(const NormArgs& args, int64_t n, int64_t rows_per_token, int64_t begin, int64_t end);
)
// clang-format on
