// Kernels of rope, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

// clang-format off
DYNO_DECLARE_KERNELS(
    // Tokens [begin, end); `table` has n_rot floats.
    void rope_tokens(const RopeArgs& args, int64_t heads, int64_t head_dim, int64_t n_rot, int64_t offset, bool neox,
                     int64_t begin, int64_t end, float* table);
)
// clang-format on
