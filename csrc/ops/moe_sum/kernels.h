// Kernels of moe_sum, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {
inline constexpr int64_t kMoeSumPiece = 512;  // columns per piece, so that several threads can share a single token
}

// clang-format off
DYNO_DECLARE_KERNELS(
    // Computes pieces [begin, end) of the output. A piece is kMoeSumPiece columns of a token; each token has `pieces`.
    void moe_sum_pieces(const MoeSumArgs& args, int64_t n, int64_t used, int64_t pieces, int64_t begin, int64_t end);
)
// clang-format on
