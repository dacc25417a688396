// Dense products of many tokens on Hopper: the inputs of gemm_wide.cuh and its launch. Plain host code.
#pragma once

#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

inline constexpr int kWideTokens = 256;  // rows of x in a tile
inline constexpr int kWideRows = 256;    // rows of w that a cluster of two blocks multiplies at a time
// Rows of each matrix of a gated pair, or of w.
constexpr int wide_rows(const Problem& p) { return p.gated() ? kWideRows / 2 : kWideRows; }
inline constexpr int64_t kWideTileBytes = kWideTokens * 128;

// With wgmma_wide_split, several clusters share the k of a tile of y and exchange sums (wide_parts.cuh). The tokens of
// a tile are divided into shares; the warps of all parts count their arrivals in one int32 for each warp of a cluster
// and share.
inline constexpr int kWideShares = 4;
inline constexpr int kWideWarps = 16;  // that multiply, of a cluster
inline constexpr int64_t kWideArrivals = int64_t{kWideWarps} * kWideShares;
inline constexpr int64_t kWideSumsBytes = int64_t{kWideRows} * kWideTokens * 4;  // of one part

// f16 rows (see HalfRows) cut into tiles of `height` rows by 64 k; one bulk copy loads a tile to shared memory. A tile
// has 128 bytes per row in the 128-byte swizzle. Tiles of the same rows are adjacent along k (and along the second
// pass), then come the next rows, then the next matrix of the batch. The scales follow after all tiles, one float per
// row of each tile. The results of rows beyond `rows` are undefined; they do not affect other rows.
struct TiledRows {
  int64_t rows = 0, k = 0, batch = 1;
  int passes = 1;
  int height = kWideTokens;  // a multiple of 8
  // For gemm_codes.cuh, with one pass and a k of whole super-blocks: each four tiles are followed by the sums of every
  // 32 of their values, as an operand [height, 16] of wgmma without swizzle: eight f16 sums, then their eight rests.
  bool sums = false;
  int64_t shared_tiles = 0;  // tiles of y whose k is shared; their arrivals and sums follow the scales
  int parts = 1;             // clusters that share the k of a tile: 1, 2 or 4

  constexpr int64_t weight_tiles() const { return (k + kGpuTile - 1) / kGpuTile; }
  constexpr int64_t k_tiles() const { return passes * weight_tiles(); }
  constexpr int64_t token_tiles() const { return (rows + height - 1) / height; }
  constexpr int64_t tile_bytes() const { return int64_t{height} * 128; }
  constexpr int64_t sums_bytes() const { return sums ? int64_t{height} * 32 : 0; }  // per four tiles
  constexpr int64_t tile_at(int64_t tile) const { return tile * tile_bytes() + tile / 4 * sums_bytes(); }
  constexpr int64_t scales_at() const { return tile_at(batch * token_tiles() * k_tiles()); }
  constexpr int64_t arrivals_at() const { return scales_at() + batch * token_tiles() * height * 4; }
  constexpr int64_t sums_at() const { return arrivals_at() + shared_tiles * kWideArrivals * 4; }
  constexpr int64_t bytes() const { return sums_at() + shared_tiles * parts * kWideSumsBytes; }
};

// Converts f32 rows to tiles; x as in halve_rows(). Also sets the arrivals of shared tiles to zero.
void tile_rows(const TiledRows& format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, uint8_t* out,
               CUstream_st* stream, const RowNorm& norm = {});
// Enqueues `p` with x in tiles of `format`; dense. `group`: number of tiles of tokens that are multiplied by all of w
// before the next ones. If format.parts is above 1, format.shared_tiles is the number of tiles of y (256 tokens, not
// gated), and the memory behind the rows is written.
void gemm_wide(const Problem& p, const TiledRows& format, int group, int multiprocessors, CUstream_st* stream);

}  // namespace dyno::ops::cuda
