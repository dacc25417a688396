// Several products of the same rows of x in one launch: the product of a tile of rows of w.
#pragma once

#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

// One of the products of a Problem. Their tiles follow each other, and no tile has rows of two products.
struct RowPart {
  const uint8_t* w;
  const float* bias;
  float* y;
  int64_t y_stride;
  int n;
  int tile;  // index within the product
};

// `tile`: index of a tile of `rows_of_w` rows among all products.
__device__ __forceinline__ RowPart row_part(const Problem& p, int tile, int rows_of_w) {
  RowPart part{p.w, p.bias, p.y, p.y_stride, p.n, tile};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int before = (part.n + rows_of_w - 1) / rows_of_w;
    if (p.more[i].n == 0 || part.tile < before) break;
    part = {p.more[i].w, p.more[i].bias, p.more[i].y, p.more[i].y_stride, p.more[i].n, part.tile - before};
  }
  return part;
}

// The number of tiles of `rows_of_w` rows of all products.
constexpr int row_tiles(const Problem& p, int rows_of_w) {
  int tiles = (p.n + rows_of_w - 1) / rows_of_w;
  for (const Part& part : p.more) tiles += (part.n + rows_of_w - 1) / rows_of_w;
  return tiles;
}

}  // namespace dyno::ops::cuda
