// Rows of halves that one launch leaves for the next one's tensor cores, so that none in between has to make them.
// Plain host code.
#pragma once

#include <cstdint>

namespace dyno::ops {

// Rows of a k of whole blocks of 256, cut into tiles of `height` rows by 64 k as TiledRows (ops/matmul/cuda/wide.h)
// cuts them, with their sums of every 32. Each row of each block has a scale of its own, a power of two. So whoever has
// 256 neighbours of a row can write them, and needs to know nothing of the rest of it. Blocks of the same rows follow
// each other along k; a block holds four tiles, their sums and one float32 scale for each row:
//
//     [4][height][64] halves | [height / 8][2][8][8] halves: sums, what they left over | [height] scales
struct HalfTiles {
  static constexpr int kBlock = 256;       // of k
  static constexpr int kRowBytes = 548;    // of a row in a block
  static constexpr int kSumsAt = 4 * 128;  // times height: where the sums begin, and the scales
  static constexpr int kScalesAt = kSumsAt + 32;

  int64_t rows = 0, k = 0;
  int height = 16;  // 16, 32, 64

  constexpr int64_t blocks() const { return k / kBlock; }
  constexpr int64_t block_bytes() const { return int64_t{height} * kRowBytes; }
  constexpr int64_t row_tiles() const { return (rows + height - 1) / height; }
  constexpr int64_t bytes() const { return row_tiles() * blocks() * block_bytes(); }
};

// As the tiles of a Desc say.
constexpr HalfTiles half_tiles(int64_t rows, int64_t k, int64_t height) {
  return {.rows = rows, .k = k, .height = static_cast<int>(height)};
}

}  // namespace dyno::ops
