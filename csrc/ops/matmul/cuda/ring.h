// The shape of a `ring` launch (ring.cuh): tasks, and the shared memory of a block. Plain host code.
#pragma once

#include <algorithm>

#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

inline constexpr int kRingRows = 32;  // maximum rows of y with experts
inline constexpr int kRingWarps = 8;  // per block
inline constexpr int kRingMaxStages = 8;
inline constexpr int kChunkTiles = 4;  // of k: one super-block, or the same length of other types
inline constexpr int kChunkK = kChunkTiles * kGpuTile;
inline constexpr int kUnitTiles = 2;  // that a warp multiplies at once (row_codes.cuh)

constexpr int chunk_bytes(DType type) {
  const GpuFormat f = gpu_format(type);
  return kChunkTiles * f.tile_bytes() + f.super_bytes();
}
constexpr bool has_block_codes(DType type) { return has_gpu_layout(type) && gpu_format(type).low_bits < 16; }
// Whether the ring, like `stream`, multiplies single rows in units of two tiles (row_codes.cuh) if all of its weights
// have this type.
constexpr bool rings_in_units(DType type) { return has_block_codes(type) && gpu_format(type).lookup(); }

// Shared memory of a block; the rings of all warps come first. Small enough for blocks of the next launch to fit on the
// multiprocessor while blocks of this one still run.
struct RingMemory {
  int stages = 0, stage_bytes = 0;
  int halves = 0, sums = 0, scales = 0, partials = 0, squares = 0, barriers = 0;  // offsets
  int64_t bytes = 0;
};
constexpr RingMemory ring_memory(DType type, DType other, int64_t k, int64_t x_rows, int blocks) {
  const int64_t slices = x_rows * ((k + kChunkK - 1) / kChunkK);
  const int room = (blocks == 1 ? 80 : 44) << 10;
  RingMemory m;
  m.stage_bytes = std::max(chunk_bytes(type), chunk_bytes(other));
  m.stages = std::clamp(room / (kRingWarps * m.stage_bytes), 2, kRingMaxStages);
  m.halves = kRingWarps * m.stages * m.stage_bytes;
  const int64_t sums = m.halves + slices * kChunkK * 2, scales = sums + slices * (kChunkK / 16) * 4;
  const int64_t partials = (scales + slices * 8 + 15) / 16 * 16;
  const int64_t squares = partials + int64_t{2} * 2 * kRingWarps * kGpuRows * 4, barriers = squares + kRingWarps * 4;
  m.bytes = barriers + kRingWarps * (m.stages + 4) * 8;
  if (m.bytes > (1 << 20)) return m;  // more than any chip has, so the offsets do not matter
  m.sums = static_cast<int>(sums), m.scales = static_cast<int>(scales), m.partials = static_cast<int>(partials);
  m.squares = static_cast<int>(squares), m.barriers = static_cast<int>(barriers);
  return m;
}

// A task is a stripe of 16 rows of w (gated: of both matrices) for one row of y. Its chunks are grouped in `segments`:
// gate and up, or the experts whose products are summed. `share` warps of a block process it.
struct RingShape {
  int tasks = 0, stripes = 0, segments = 1, chunks = 0;  // chunks: per segment
  int x_rows = 1, share = 1;
  RingMemory memory;

  // Tasks are distributed over the blocks first, then over the groups of a block.
  constexpr int first_task(int block, int blocks, int warp) const { return block + blocks * (warp / share); }
  constexpr int tasks_at_once(int blocks) const { return blocks * (kRingWarps / share); }
};
inline RingShape ring_shape(const Problem& p, DType other, int share, int blocks) {
  const auto stripes = [](int n) { return (n + kGpuRows - 1) / kGpuRows; };
  const bool experts = p.grouping == Grouping::experts, summed = p.grouping == Grouping::summed;
  RingShape s;
  s.stripes = stripes(p.n);
  for (const Part& part : p.more) s.stripes += stripes(part.n);
  s.tasks = s.stripes * (summed ? p.rows / p.used : experts ? p.rows : 1);
  s.segments = summed ? p.used : p.gated() ? 2 : 1;
  s.chunks = (p.k + kChunkK - 1) / kChunkK;
  s.x_rows = summed ? p.rows : experts ? (p.rows + p.x_divisor - 1) / p.x_divisor : 1;
  s.share = share;
  s.memory = ring_memory(p.type, other, p.k, s.x_rows, blocks);
  return s;
}

template <DType kType, DType kOther>
void launch_ring(const Problem& p, int share, int blocks, int multiprocessors, CUstream_st* stream);

// Enqueues the launch for quantised weights with one row of y per matrix; `other`: the second type of p's parts, or
// p.type. `blocks` (1 or 2) persistent blocks per multiprocessor; `share` (1, 2, 4, 8) warps of a block process a
// stripe together.
void run_ring(const Problem& p, DType other, int share, int blocks, int multiprocessors, CUstream_st* stream);

}  // namespace dyno::ops::cuda
