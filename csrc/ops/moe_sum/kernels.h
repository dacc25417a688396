// Kernels of moe_sum, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {
inline constexpr int64_t kMoeSumPiece = 512;  // columns; so that a single token is work for several threads
}

// clang-format off
DYNO_DECLARE_KERNELS(
    // Pieces [begin, end) of the output, each kMoeSumPiece columns of a token; `pieces` of them a token.
    void moe_sum_pieces(const MoeSumArgs& args, int64_t n, int64_t used, int64_t pieces, int64_t begin, int64_t end);
)
// clang-format on
