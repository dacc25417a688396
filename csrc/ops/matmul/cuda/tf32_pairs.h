// Products with float32 weights on tensor cores: the tile shapes, for the host. See tf32_pairs.cu.
#pragma once

#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

// Rows of w and of x that a block multiplies; half as many rows of x, if there are few blocks.
constexpr int tf32_pairs_columns(int64_t n) { return n <= 32 ? 32 : n <= 64 ? 64 : 128; }
constexpr int tf32_pairs_rows(int64_t n) { return 8192 / tf32_pairs_columns(n); }

// `parts` (1, 2, 4, 8, 16) blocks share k, a multiple of 32; one matrix, plain.
void gemm_tf32_pairs(const Problem& p, int parts, int multiprocessors, CUstream_st* stream);

}  // namespace dyno::ops::cuda
