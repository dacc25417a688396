// The forms in which kernels of choice.h read rows of x: what choice.cpp checks and choice_run.cpp launches.
#pragma once

#include <iterator>

#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/cuda/gemm_ring.h"
#include "ops/matmul/cuda/sorted.h"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

inline constexpr int kWideGroup = 16;  // tiles of tokens

inline bool has_tiles(const Shape& s) { return s.x_tiles > 0 || s.y_tiles > 0; }

inline CodesForm form_of(const Shape& s) {
  return s.x_tiles > 0 ? CodesForm::from_tiles : s.y_tiles > 0 ? CodesForm::to_tiles : CodesForm::rows;
}

inline GemmRingShape ring_shape_of(const Shape& s, const Choice& choice) {
  return gemm_ring_shape(s.type, s.k, choice.tokens, choice.rows, choice.parts, choice.blocks,
                         choice.kernel == Kernel::wgmma_codes, form_of(s));
}

inline TiledRows tiled_rows(const Shape& s, int height = kWideTokens) {
  return {
      .rows = s.x_rows / s.matrices, .k = s.k, .batch = s.matrices, .passes = half_passes(s.type), .height = height};
}

inline TiledRows ring_rows(const Shape& s, const Choice& choice) {
  TiledRows format = tiled_rows(s, choice.tokens);
  format.sums = choice.kernel == Kernel::wgmma_codes;
  return format;
}

// Tiles of wgmma_wide, if no product of a launch with several ends with a part of a tile.
inline int64_t wide_tiles(const Shape& s) {
  const int64_t rows = s.x_rows / s.matrices, rows_of_w = s.gated ? kWideRows / 2 : kWideRows;
  return s.matrices * ((rows + kWideTokens - 1) / kWideTokens) * ((s.n + rows_of_w - 1) / rows_of_w);
}

inline TiledRows wide_format(const Shape& s, const Choice& choice) {
  TiledRows format = tiled_rows(s);
  if (choice.kernel != Kernel::wgmma_wide_split) return format;
  format.parts = choice.parts;
  format.shared_tiles = wide_tiles(s);
  // Each further product of the launch may end with one more part of a tile.
  if (s.other) format.shared_tiles += format.batch * format.token_tiles() * std::ssize(Problem{}.more);
  return format;
}

inline SortedRows sorted_rows(const Shape& s) {
  return {.rows = s.rows, .k = s.k, .matrices = s.matrices, .passes = half_passes(s.type)};
}

}  // namespace dyno::ops::cuda
