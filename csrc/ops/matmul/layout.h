// Layout x16 of quantised weight matrices: 16 rows are interleaved, so that one vector load reads 4 values of k for
// each of 16 rows, in the order of the dot-product instructions.
//
// A matrix [n, k] has ceil(n / 16) tiles. A tile has k / block consecutive records. A record has 16 rows of one block
// of the file: a header with the scales (the arrays of quant_format.h) and, for each 32 k, the bit planes of the
// integers (see unpack.h). The conversion is lossless. Sizes are as in the file, except that 6-bit scales take a byte
// (q4_k +2.8 %, q5_k +2.3 %, q3_k +3.6 %, iq4_xs +1.5 %). If the last tile has fewer than 16 rows, its last row is
// repeated; results of repeated rows are never stored.
//
// Float types have no x16 layout, because their dot products read plain rows. gpu_layout.h describes and creates
// Layout::gpu; the functions here also return its sizes and rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/device_info.h"
#include "core/dtype.h"
#include "ops/op.h"

namespace dyno::ops {

inline constexpr int64_t kTileRows = 16;

bool layout_supported(DType type, Layout layout);

// Bytes of a matrix [rows, k]. Throws UnsupportedError if the type does not have the layout, or if k is not a multiple
// of its block.
size_t layout_bytes(DType type, Layout layout, int64_t rows, int64_t k);

// Writes a plain matrix [rows, k] in layout x16, layout_bytes(type, Layout::x16, rows, k) bytes. To divide the work,
// call it with ranges of tiles: repack_rows(…, first_tile, n_tiles) writes only these tiles; `plain` and `out` are
// always the whole matrix. `rows` need not be a multiple of 16.
void repack_rows(DType type, const void* plain, void* out, int64_t rows, int64_t k);
void repack_rows(DType type, const void* plain, void* out, int64_t rows, int64_t k, int64_t first_tile,
                 int64_t n_tiles);

// Rows of a matrix in any layout as floats [rows, k], bit-exact with dequantize_row.
void unpack_rows(DType type, Layout layout, const void* w, float* out, int64_t rows, int64_t k, CpuIsa isa);

}  // namespace dyno::ops
