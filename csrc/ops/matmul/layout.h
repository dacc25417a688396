// Layout x16 of quantised weight matrices: 16 rows interleaved so that one vector load brings 4 values of k for each of
// 16 rows, in the order of the dot-product instructions.
//
// A matrix [n, k] is ceil(n / 16) tiles; a tile is k / block records one after the other; a record holds 16 rows of one
// block of the file: a header with the scales (the arrays of quant_format.h) and, for each 32 k, the bit planes of the
// integers (the picture in unpack.h). Nothing is lost or rounded. Sizes: as in the file, but 6-bit scales take a byte
// (q4_k +2.8 %, q5_k +2.3 %, q3_k +3.6 %, iq4_xs +1.5 %). The rows that a last tile lacks repeat its last row; their
// results are never stored.
//
// Float types have no x16 layout: their dot products read rows as they are. Layout::gpu is described and made in
// gpu_layout.h; its sizes and rows are had here as well.
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

// Bytes of a matrix [rows, k]. Throws UnsupportedError when the type has no such layout or k is no multiple of its
// block.
size_t layout_bytes(DType type, Layout layout, int64_t rows, int64_t k);

// Writes a plain matrix [rows, k] in layout x16: layout_bytes(type, Layout::x16, rows, k) bytes. To share the work,
// call it with ranges of tiles: repack_rows(…, first_tile, n_tiles) writes these tiles only; `plain` and `out` are
// always those of the whole matrix. Not exact multiples of 16 rows are fine.
void repack_rows(DType type, const void* plain, void* out, int64_t rows, int64_t k);
void repack_rows(DType type, const void* plain, void* out, int64_t rows, int64_t k, int64_t first_tile,
                 int64_t n_tiles);

// Rows of a matrix in any layout as floats [rows, k], bit for bit what dequantize_row gives.
void unpack_rows(DType type, Layout layout, const void* w, float* out, int64_t rows, int64_t k, CpuIsa isa);

}  // namespace dyno::ops
