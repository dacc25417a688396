// The shared memory of a launch of gemm_ring.cuh. Plain host code.
#pragma once

#include <algorithm>

#include "ops/half_tiles.h"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

inline constexpr int kGemmRingWarps = 8;  // that multiply; one more keeps the ring full
inline constexpr int kGemmRingMaxStages = 8;
inline constexpr int kGemmRingBarrierBytes = 24;  // of a stage

[[noreturn]] void throw_no_tile(const char* variant, int64_t rows, int64_t tokens);  // of w and x

// Tiles of k in a stage: one super-block, or as much of the other types; of 8-bit codes half of it.
constexpr int gemm_ring_tiles(DType type) { return gpu_format(type).low_bits == 8 ? kChunkTiles / 2 : kChunkTiles; }
constexpr int gemm_ring_chunk_bytes(DType type) {
  return gemm_ring_tiles(type) * gpu_format(type).tile_bytes() + gpu_format(type).super_bytes();
}
constexpr int64_t gemm_ring_chunks(DType type, int64_t k) {
  const int of_chunk = gemm_ring_tiles(type) * kGpuTile;
  return (k + of_chunk - 1) / of_chunk;
}

// How rows come to gemm_codes.cuh, and how they leave.
enum class CodesForm : uint8_t {
  rows,        // x in TiledRows with sums, y in float32
  from_tiles,  // x in HalfTiles (ops/half_tiles.h)
  to_tiles,    // y in HalfTiles, of a gated pair: blocks that have 256 neighbours of y between them are one cluster
};

// A block multiplies `tokens` rows of x with `rows` (128, 256) rows of w over one of `parts` of k. A stage holds the
// tiles of x, then a chunk of each stripe of w. When all has been multiplied, sums take the place of the stages: those
// of 256 rows in one plane; of 128 rows, where two warpgroups share k, in two.
struct GemmRingShape {
  int rows = 256, parts = 1, stages = 0;
  int x_bytes = 0, stage_bytes = 0, sums_stride = 0;  // sums_stride: floats from one token to the next
  int64_t barriers = 0, bytes = 0;                    // where the barriers stand, and all
  bool spread = false;  // where two blocks find room on a multiprocessor, those of a cluster take one each
  bool codes = false;   // for gemm_codes.cuh, whose stages hold sums of x as well
  CodesForm form = CodesForm::rows;

  constexpr int planes() const { return rows == 128 && !codes ? 2 : 1; }
  constexpr int warps() const { return rows == 512 ? 2 * kGemmRingWarps : kGemmRingWarps; }  // that multiply
  // Blocks along w of one cluster.
  constexpr int joint() const { return form == CodesForm::to_tiles ? 2 * HalfTiles::kBlock / rows : 1; }
  // Of a stage. Codes: a barrier for the weights of each warp and one for x, and a counter of the warps that have read.
  constexpr int barrier_bytes() const { return codes ? 8 * warps() + 16 : kGemmRingBarrierBytes; }
  // The ring is deep enough to be filled while it is read.
  constexpr bool fits() const { return stages > 0; }
};

// `blocks`: so many find room on a multiprocessor at once, of this launch or of the next one. !fits(): not even two
// stages do.
constexpr GemmRingShape gemm_ring_shape(DType type, int64_t k, int tokens, int rows, int parts, int blocks,
                                        bool codes = false, CodesForm form = CodesForm::rows) {
  constexpr int kAlignment = 1024;
  // Of the 228 KiB of a multiprocessor each block takes one for itself, and one is lost to the alignment. Where blocks
  // share it, some is left to the small launches between products.
  const int64_t all = int64_t{blocks == 1 ? 228 : codes ? 222 : 220} << 10;
  GemmRingShape s{.rows = rows, .parts = parts, .spread = blocks > 1, .codes = codes, .form = form};
  const int64_t room = all / blocks - (1 << 10) - kAlignment - kGemmRingMaxStages * s.barrier_bytes();
  s.x_bytes = gemm_ring_tiles(type) * tokens * 128 + (codes ? tokens * 32 : 0);
  if (form == CodesForm::from_tiles) s.x_bytes = tokens * HalfTiles::kRowBytes;
  s.stage_bytes =
      (s.x_bytes + rows / kGpuRows * gemm_ring_chunk_bytes(type) + kAlignment - 1) / kAlignment * kAlignment;
  s.sums_stride = rows + 4;  // the lanes of a warp store without bank conflicts
  const int64_t of_part = (gemm_ring_chunks(type, k) + parts - 1) / parts;
  const int64_t sums = int64_t{4} * s.planes() * tokens * s.sums_stride;
  const int64_t stages = std::min({room / s.stage_bytes, of_part, int64_t{kGemmRingMaxStages}});
  if (stages < std::min<int64_t>(of_part, 2) || sums > room) return s;
  s.stages = static_cast<int>(stages);
  s.barriers = (std::max<int64_t>(stages * s.stage_bytes, sums) + 7) / 8 * 8;
  s.bytes = s.barriers + stages * s.barrier_bytes() + kAlignment;
  return s;
}

// `p` with x in tiles of `format`, whose height is the block's number of tokens; dense, quantised weights.
void run_gemm_ring(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

// Types of super-blocks that gemm_codes.cuh reads.
constexpr bool has_code_tiles(DType type) { return type == DType::q4_k || type == DType::q5_k || type == DType::q6_k; }
// Types and rows of w whose products read and write HalfTiles.
constexpr bool has_half_tiles(DType type, int rows) { return type == DType::q4_k && rows <= 256; }
// The same by gemm_codes.cuh: x with sums (TiledRows::sums), `shape` with `codes`, a type of has_code_tiles(). Of other
// forms than CodesForm::rows, a type of has_half_tiles(); format.height is that of the HalfTiles.
void run_gemm_codes(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

}  // namespace dyno::ops::cuda
