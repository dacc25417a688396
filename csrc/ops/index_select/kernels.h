// CPU kernels of index_select, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {

// Queries of a token, transposed: for each group of heads that fills a vector, [dk, lanes], then all weights. Missing
// heads are zero. Vectors have at most 16 lanes.
constexpr int64_t index_query_floats(int64_t heads, int64_t dk) { return (heads + 15) / 16 * 16 * (dk + 1); }

}  // namespace dyno::ops

// clang-format off
DYNO_DECLARE_KERNELS(
    // q [heads, dk] and weights [heads] in the order that index_scores() reads.
    void index_queries(const float* q, const float* weights, int64_t heads, int64_t dk, float* out);
    // The scores of `count` keys. The arithmetic of a key does not depend on the others.
    void index_scores(const float* queries, int64_t heads, int64_t dk, const std::byte* keys, int64_t row_bytes,
                      int64_t count, float* scores);
)
// clang-format on
