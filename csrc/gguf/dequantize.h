// Rows of quantised weights to float32 and back: the portable reference that kernels are compared with.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace dyno {

bool can_dequantize(DType type);
bool can_quantize(DType type);

// Writes `n` floats. `blocks` holds n / block_elements packed blocks as in the file, 2-byte aligned (no more is asked
// of f32 rows), after the bytes that the type has before the blocks of a row: so many values as a row has. Bit-exact
// with the public `gguf` package and ik_llama.cpp; NaNs stay NaN. Throws UnsupportedError for a type without a
// formula here (see can_dequantize) and Error when n is negative or no multiple of the block.
void dequantize_row(DType type, const void* blocks, float* out, int64_t n);

// Rows of `k` values that follow each other. Throws as dequantize_row.
void dequantize_rows(DType type, const void* rows, float* out, int64_t n_rows, int64_t k);

// The inverse for f32, f16, bf16 (round to nearest even) and q8_0 (d = max|x| / 127, halves away from zero). A q8_0
// block with a value that is not finite becomes all NaN, so that the fault stays visible. Throws as dequantize_row.
void quantize_row(DType type, const float* values, void* blocks, int64_t n);

}  // namespace dyno
