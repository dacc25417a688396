// `walk` (walk.cuh): gated products of few tokens' experts by blocks that stay, each of which takes one pair of stripes
// after the other. Plain host code.
#pragma once

#include "ops/matmul/cuda/ring.h"

namespace dyno::ops::cuda {

inline constexpr int kWalkRows = 32;      // maximum rows of y
inline constexpr int kWalkMaxWarps = 16;  // per block

// Units of 128 values of a row, which the warps of a block share.
constexpr int64_t walk_units(int64_t k) { return (k + kUnitTiles * kGpuTile - 1) / (kUnitTiles * kGpuTile); }

// A gated pair that a token uses in addition to its experts, with weights of the same type and k.
struct SharedPair {
  const uint8_t* w = nullptr;
  const uint8_t* w_up = nullptr;
  float* y = nullptr;
  int32_t n = 0;

  constexpr int stripes() const { return (n + kGpuRows - 1) / kGpuRows; }
};

template <DType kType>
void launch_walk(const Problem& p, const SharedPair& pair, int warps, int blocks, int multiprocessors,
                 CUstream_st* stream);

// Enqueues the launch: p.x_bytes has the rows of x, and each multiprocessor gets up to `blocks` blocks of `warps`
// warps. `pair`: of a shared expert, or none; only with one token.
void run_walk(const Problem& p, const SharedPair& pair, int warps, int blocks, int multiprocessors,
              CUstream_st* stream);

}  // namespace dyno::ops::cuda
