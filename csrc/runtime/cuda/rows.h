// Small kernels of the executor that are not ops of a plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/likely.h"

struct CUstream_st;

namespace dyno::runtime {

// row i of `values` = row rows[i], in place, for i < count. `rows` must be ascending, and `row_bytes` a multiple of 4.
void gather_rows(std::byte* values, size_t row_bytes, const int32_t* rows, int64_t count, CUstream_st* stream);

// values = cap * tanh(values / cap)
void soft_cap(float* values, int64_t count, float cap, CUstream_st* stream);

// The most probable token of each of `rows` rows of logits.
void find_likely(const float* logits, int64_t rows, int64_t n_vocab, Likely* likely, CUstream_st* stream);

}  // namespace dyno::runtime
