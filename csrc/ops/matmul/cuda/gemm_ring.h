// The shared memory of a gemm_ring.cuh launch. Plain host code.
#pragma once

#include <algorithm>
#include <bit>

#include "ops/half_tiles.h"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

inline constexpr int kGemmRingWarps = 8;  // multiplying warps; one more fills the ring
inline constexpr int kGemmRingMaxStages = 8;
inline constexpr int kGemmRingBarrierBytes = 24;  // per stage

[[noreturn]] void throw_no_tile(const char* variant, int64_t rows, int64_t tokens);  // of w and x

// Tiles of k per stage: one super-block, or the same length of other types; half of it for 8-bit codes.
constexpr int gemm_ring_tiles(DType type) { return gpu_format(type).low_bits == 8 ? kChunkTiles / 2 : kChunkTiles; }
constexpr int gemm_ring_chunk_bytes(DType type) {
  return gemm_ring_tiles(type) * gpu_format(type).tile_bytes() + gpu_format(type).super_bytes();
}
constexpr int64_t gemm_ring_chunks(DType type, int64_t k) {
  const int of_chunk = gemm_ring_tiles(type) * kGpuTile;
  return (k + of_chunk - 1) / of_chunk;
}

// The form in which gemm_codes.cuh reads and writes rows.
enum class CodesForm : uint8_t {
  rows,        // x in TiledRows with sums, y in float32
  from_tiles,  // x in HalfTiles (ops/half_tiles.h)
  to_tiles,    // y in HalfTiles, for a gated pair: blocks that together have 256 adjacent columns of y are one cluster
};

// A block multiplies `tokens` rows of x by `rows` (64, 128, 256, 512) rows of w over one of `parts` of k. A stage has
// the tiles of x, then a chunk of each stripe of w. After the last product, sums replace the stages: one plane for 256
// rows; two planes for 128 rows, where two warpgroups share k.
struct GemmRingShape {
  int rows = 256, parts = 1, stages = 0;
  int inverse_parts = 1 << 16;                        // 2^16 / parts, rounded up
  int quads_log2 = 6;                                 // rows / 4 is this power of two
  int x_bytes = 0, stage_bytes = 0, sums_stride = 0;  // sums_stride: floats from one token to the next
  int64_t barriers = 0, bytes = 0;                    // offset of the barriers, and total size
  bool spread = false;  // if two blocks fit on a multiprocessor, the blocks of a cluster are placed on different ones
  bool codes = false;   // for gemm_codes.cuh, whose stages also have sums of x
  CodesForm form = CodesForm::rows;

  constexpr int planes() const { return rows == 128 && !codes ? 2 : 1; }
  // Multiplying warps.
  constexpr int warps() const {
    return rows == 512 ? 2 * kGemmRingWarps : rows == 64 ? kGemmRingWarps / 2 : kGemmRingWarps;
  }
  // Blocks of one cluster along w.
  constexpr int joint() const { return form == CodesForm::to_tiles ? 2 * HalfTiles::kBlock / rows : 1; }
  // In the epilogue, block `part` of those that share k adds the sums of rows [first_of(part), first_of(part + 1)) of
  // the tile of x. If `parts` does not divide the tile, the shares differ by one row.
  // This is tokens · part / parts without a division, because it is on the way from the last product to the store.
  constexpr int first_of(int part, int tokens) const { return tokens * part * inverse_parts >> 16; }
  // Per stage. Codes: a barrier for the weights of each warp, one for x, and a counter of the warps that have read.
  constexpr int barrier_bytes() const { return codes ? 8 * warps() + 16 : kGemmRingBarrierBytes; }
  // Whether the ring is deep enough to be filled while it is read.
  constexpr bool fits() const { return stages > 0; }
};

// `blocks`: number of blocks, of this launch or the next one, that fit on a multiprocessor at once. !fits(): not even
// two stages fit.
constexpr GemmRingShape gemm_ring_shape(DType type, int64_t k, int tokens, int rows, int parts, int blocks,
                                        bool codes = false, CodesForm form = CodesForm::rows) {
  constexpr int kAlignment = 1024;
  // Of the 228 KiB of a multiprocessor, each block reserves one, and alignment takes another. If blocks share a
  // multiprocessor, some memory is left for the small launches between products.
  // Four blocks need all of it for two stages of 32 tokens.
  const int64_t all = int64_t{blocks == 1 || (blocks == 4 && tokens == 32) ? 228 : codes ? 222 : 220} << 10;
  GemmRingShape s{.rows = rows,
                  .parts = parts,
                  .inverse_parts = ((1 << 16) + parts - 1) / parts,
                  .quads_log2 = std::countr_zero(static_cast<unsigned>(rows)) - 2,
                  .spread = blocks > 1,
                  .codes = codes,
                  .form = form};
  const int64_t room = all / blocks - (1 << 10) - kAlignment - kGemmRingMaxStages * s.barrier_bytes();
  s.x_bytes = gemm_ring_tiles(type) * tokens * 128 + (codes ? tokens * 32 : 0);
  if (form == CodesForm::from_tiles) s.x_bytes = tokens * HalfTiles::kRowBytes;
  s.stage_bytes =
      (s.x_bytes + rows / kGpuRows * gemm_ring_chunk_bytes(type) + kAlignment - 1) / kAlignment * kAlignment;
  s.sums_stride = rows + 4;  // without bank conflicts in the stores of a warp
  const int64_t of_part = (gemm_ring_chunks(type, k) + parts - 1) / parts;
  const int64_t sums = int64_t{4} * s.planes() * tokens * s.sums_stride;
  const int64_t stages = std::min({room / s.stage_bytes, of_part, int64_t{kGemmRingMaxStages}});
  if (stages < std::min<int64_t>(of_part, 2) || sums > room) return s;
  s.stages = static_cast<int>(stages);
  s.barriers = (std::max<int64_t>(stages * s.stage_bytes, sums) + 7) / 8 * 8;
  s.bytes = s.barriers + stages * s.barrier_bytes() + kAlignment;
  return s;
}

// Enqueues `p` with x in tiles of `format`, whose height is the block's number of tokens; dense, quantised weights.
void run_gemm_ring(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

// Types of super-blocks that gemm_codes.cuh reads.
constexpr bool has_code_tiles(DType type) { return type == DType::q4_k || type == DType::q5_k || type == DType::q6_k; }
// Types and rows of w whose products can read and write HalfTiles.
constexpr bool has_half_tiles(DType type, int rows) { return type == DType::q4_k && rows <= 256; }
// Blocks of 64 rows of w have instances for the type with most weights only.
constexpr bool has_small_blocks(DType type) { return type == DType::q4_k; }
// The same with gemm_codes.cuh: x with sums (TiledRows::sums), `shape` with `codes`, a type of has_code_tiles(). Forms
// other than CodesForm::rows need a type of has_half_tiles(); format.height is then the height of the HalfTiles.
void run_gemm_codes(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

}  // namespace dyno::ops::cuda
