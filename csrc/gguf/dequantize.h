// Conversion of quantised rows to float32 and back: the portable reference for all kernels.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace dyno {

bool can_dequantize(DType type);
bool can_quantize(DType type);

// Writes `n` floats, which must be a whole row if the type has bytes before the blocks of a row. `blocks` has those
// bytes and then n / block_elements packed blocks as in the file, 2-byte aligned (also for f32 rows). Bit-exact with
// the public `gguf` package and ik_llama.cpp; NaNs stay NaN. Throws UnsupportedError for a type without a formula here
// (see can_dequantize), and Error if n is negative or not a multiple of the block.
void dequantize_row(DType type, const void* blocks, float* out, int64_t n);

// Consecutive rows of `k` values. Throws as dequantize_row.
void dequantize_rows(DType type, const void* rows, float* out, int64_t n_rows, int64_t k);

// The inverse for f32, f16, bf16 (round to nearest even) and q8_0 (d = max|x| / 127, ties away from zero). A q8_0 block
// with a non-finite value becomes all NaN, so that the error stays visible. Throws as dequantize_row.
void quantize_row(DType type, const float* values, void* blocks, int64_t n);

}  // namespace dyno
