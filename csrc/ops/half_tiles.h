// f16 rows that one launch writes for the tensor cores of the next one, which saves a conversion launch between them.
// Plain host code.
#pragma once

#include <cstdint>

namespace dyno::ops {

// Rows with k in whole blocks of 256, cut into tiles of `height` rows by 64 k like TiledRows (ops/matmul/cuda/wide.h),
// with sums over every 32 values. Each row has one scale per block, a power of two. So a kernel that has 256 adjacent
// values of a row can write them without knowing the rest of the row. Blocks of the same rows follow each other along
// k. A block has four tiles, their sums and one float32 scale for each row:
//
//     [4][height][64] f16 | [height / 8][2][8][8] f16: sums, and their rounding errors | [height] scales
struct HalfTiles {
  static constexpr int kBlock = 256;       // of k
  static constexpr int kRowBytes = 548;    // of one row in a block
  static constexpr int kSumsAt = 4 * 128;  // times height: offset of the sums, and of the scales after them
  static constexpr int kScalesAt = kSumsAt + 32;

  int64_t rows = 0, k = 0;
  int height = 16;  // 16, 32, 64

  constexpr int64_t blocks() const { return k / kBlock; }
  constexpr int64_t block_bytes() const { return int64_t{height} * kRowBytes; }
  constexpr int64_t row_tiles() const { return (rows + height - 1) / height; }
  constexpr int64_t bytes() const { return row_tiles() * blocks() * block_bytes(); }
};

// The layout of a Desc's tiles.
constexpr HalfTiles half_tiles(int64_t rows, int64_t k, int64_t height) {
  return {.rows = rows, .k = k, .height = static_cast<int>(height)};
}

}  // namespace dyno::ops
