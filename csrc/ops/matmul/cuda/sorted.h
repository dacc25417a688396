// Products of experts for many tokens on Hopper: rows sorted by expert, for the kernel of gemm_sorted.cuh. Plain host
// code.
#pragma once

#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

inline constexpr int64_t kSortedExperts = 1024;          // at most; counts are in shared memory
inline constexpr int kSortedUnit = 32;                   // widths of tiles are multiples of this
inline constexpr int kSortedLeast = 2, kSortedMost = 8;  // units of a tile

// The rows of an expert and its first place.
struct SortedExpert {
  int32_t first_place, rows;
};
// Rows of one expert that a cluster multiplies at a time: `width` places, of which `rows` have a row.
struct SortedTile {
  int32_t matrix, first_place, width, rows;
};
// Tiles of an expert: as few as possible, and nearly equal. The first `longer` have one unit more.
struct SortedTiling {
  int tiles, units, longer;
  constexpr explicit SortedTiling(int rows) : tiles(0), units(0), longer(0) {
    const int all = (rows + kSortedUnit - 1) / kSortedUnit;
    if (all == 0) return;
    tiles = (all + kSortedMost - 1) / kSortedMost;
    units = all / tiles;
    longer = all % tiles;
    if (units < kSortedLeast) units = kSortedLeast;  // one tile, which also has places of other experts
  }
  constexpr int first_unit(int tile) const { return tile * units + (tile < longer ? tile : longer); }
  // The number of tiles with this many units.
  constexpr int count(int of_units) const {
    return of_units == units ? tiles - longer : of_units == units + 1 ? longer : 0;
  }
};

// The workspace of a launch. Each row (token, slot) of x has a place. The places of an expert are adjacent, begin at a
// multiple of eight, and have the order of the rows, so that results do not depend on which thread sorts first.
//   tiles    f16 rows as in TiledRows with one tile of all places for each 64 k, so any eight places are contiguous
//   scales   one float for each place
//   experts  SortedExpert [matrices]
//   list     the number of tiles of rows in 16 bytes, then the tiles, widest first, so that clusters end together
//   row_of   int32 for each place; undefined for places without a row
//   place_of int32 for each row; -1 for a row without an expert
struct SortedRows {
  int64_t rows = 0, k = 0, matrices = 1;
  int passes = 1;

  // A tile may read up to 255 places beyond the last row.
  constexpr int64_t places() const {
    const int64_t used = matrices < rows ? matrices : rows;
    return (rows + 7 * used + 7) / 8 * 8 + kWideTokens;
  }
  constexpr int64_t weight_tiles() const { return (k + kGpuTile - 1) / kGpuTile; }
  constexpr int64_t k_tiles() const { return passes * weight_tiles(); }
  constexpr int64_t tile_bytes() const { return places() * 128; }
  constexpr int64_t scales_at() const { return k_tiles() * tile_bytes(); }
  constexpr int64_t experts_at() const { return scales_at() + places() * 4; }
  constexpr int64_t list_at() const {
    return experts_at() + (matrices + 1) / 2 * 2 * static_cast<int64_t>(sizeof(SortedExpert));
  }
  constexpr int64_t most_tiles() const {
    return rows / (kSortedUnit * kSortedMost) + (matrices < rows ? matrices : rows);
  }
  constexpr int64_t row_of_at() const {
    return list_at() + (1 + most_tiles()) * static_cast<int64_t>(sizeof(SortedTile));
  }
  constexpr int64_t place_of_at() const { return row_of_at() + places() * 4; }
  constexpr int64_t bytes() const { return place_of_at() + rows * 4; }
};

// ---- Launches. ----------------------------------------------------------------------------------------------------

// Sorts p.ids: writes experts, row_of and place_of.
void sort_rows(const Problem& p, const SortedRows& format, uint8_t* out, CUstream_st* stream);
// Writes the list, and converts the f32 rows p.x to the tiles of their places; row r of x is read by rows r·p.x_divisor
// and following. Sets rows of p.y without an expert to zero.
void tile_sorted_rows(const Problem& p, const SortedRows& format, uint8_t* out, CUstream_st* stream);
// Multiplies. p.x is the workspace.
void gemm_sorted(const Problem& p, const SortedRows& format, int multiprocessors, CUstream_st* stream);

}  // namespace dyno::ops::cuda
