// The problem that the matrix kernels of all four families solve: one product, or a gated pair of products of the same
// rows. The families' launch functions fill it; plain host code.
#pragma once

#include <cstdint>
#include <numeric>

#include "ops/cuda_stream.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/op.h"

namespace dyno::ops::cuda {

// The assignment of rows of x and y to matrices.
enum class Grouping : uint8_t {
  dense,    // every row is multiplied by matrix `batch index`
  experts,  // row r = (token, slot) is multiplied by matrix ids[r]; without a matrix (-1), y's row is zero at no cost
  summed,   // all rows have a matrix; y is the sum of a token's rows, each times its slot's weight (matvec only)
};

// An additional product of the same rows of x: all kernels of Layout::gpu but wgmma_split and path dequantize.
struct Part {
  DType type = DType::f32;
  int32_t n = 0;
  const uint8_t* w = nullptr;
  const float* bias = nullptr;
  float* y = nullptr;
  int64_t y_stride = 0;
};

// A product that every token uses in addition to its experts, with weights of the same type. It is one more part of the
// sum, with a separate k and weight 1 (stream only).
struct SharedExpert {
  const uint8_t* w = nullptr;  // null: there is none
  const float* x = nullptr;    // [tokens, k]
  int32_t k = 0;
};

struct Problem {
  DType type = DType::f32;
  const uint8_t* w = nullptr;
  const uint8_t* w_up = nullptr;  // gated: y = activation(x·wᵀ + bias, x·w_upᵀ + bias_up)
  int64_t w_stride = 0;           // bytes between matrices
  const float* bias = nullptr;    // [n], or [matrices, n] with experts
  const float* bias_up = nullptr;
  const float* residual = nullptr;  // dense and not gated: y = residual + scale·(x·wᵀ + bias)
  float scale = 1.0f;
  Activation activation = Activation::silu;

  const uint8_t* x = nullptr;        // float32 rows, or half rows of HalfRows
  int64_t x_stride = 0;              // bytes between rows
  int64_t x_batch_stride = 0;        // bytes
  const uint8_t* x_bytes = nullptr;  // experts: the rows of x as byte rows without gaps, or null
  int32_t x_divisor = 1;             // experts: row r reads row r / x_divisor of x
  float* y = nullptr;
  int64_t y_stride = 0;  // elements between rows
  int64_t y_batch_stride = 0;

  int32_t rows = 0;  // of y: m, or m·used
  int32_t n = 0, k = 0;
  int32_t matrices = 1;  // batch, or experts
  // Matrices [first, last) are multiplied; w and w_up point to where matrix 0 would be.
  int32_t first_matrix = 0, last_matrix = 1;

  Grouping grouping = Grouping::dense;
  const int32_t* ids = nullptr;  // [rows]
  // Written by group_rows(): first_tile [matrices + 1], first_row [matrices + 1], order [rows with a matrix].
  int32_t* groups = nullptr;

  // Each row is normalised before the product: x / sqrt(mean(x²) + norm_eps)·norm (null: all ones).
  bool normed = false;
  const float* norm = nullptr;
  float norm_eps = 0;
  const float* slot_weights = nullptr;  // summed: [rows]
  int32_t used = 1;                     // summed: rows of a token
  bool settled = false;                 // summed: ids may be read before earlier launches have ended
  Part more[2]{};                       // dense: further products, if n > 0
  SharedExpert shared{};                // summed
  int32_t shared_limit = 0;             // maximum shared memory of a block in bytes; filled by run()
  int32_t passes = 1;                   // of f16 rows x, see HalfRows

  constexpr bool gated() const { return w_up != nullptr; }
};

// Activations as f16 rows: k values padded to 64 with zeros, then one float s, with x = s·value. s is a power of two
// that scales the largest value of the row to [2^9, 2^10), so that neither range nor small values are lost.
// Float weights are exact in the products, so their activations must be as well. Their rows have all k values twice
// (passes = 2): first the f16 values, then their rests as f16; and the products read the weights twice. bfloat16 has
// the range of float32: those rows have one pass with s = 1.
struct HalfRows {
  int passes = 1;
  bool bf16 = false;

  constexpr int64_t row_bytes(int64_t k) const { return passes * ((k + 63) / 64 * 128) + 64; }
};
constexpr int half_passes(DType type) { return type == DType::f16 || type == DType::bf16 ? 2 : 1; }

// Weights that path `dequantize` has written to memory; matrices follow each other without gaps.
enum class Unpacked : uint8_t {
  rows_f16,   // [n, k]
  rows_bf16,  // [n, k]
  rows_f32,   // [n, k]
  fragments,  // Layout::gpu of type f16
  // Blocks of 64 rows by 64 k in the 128-byte swizzle; the blocks of a block row are adjacent. For a gated pair, each
  // block has 32 rows of both matrices, as in staged_tiles.cuh.
  tiles_f16,
  tiles_bf16,
};
// Bytes of `n` rows of k (tiles of a gated pair: n is twice the rows of each matrix).
int64_t unpacked_bytes(Unpacked form, int64_t n, int64_t k);

inline constexpr int kStagedTokens = 128;  // rows of x in a tile of gemm_unpacked

// The part to unpack: rows [first_row, first_row + rows) (a multiple of 16, except at the end of the matrix) of
// matrices [first_matrix, first_matrix + matrices) of a weight in Layout::gpu.
struct UnpackJob {
  const uint8_t* w = nullptr;
  int64_t w_stride = 0;  // bytes between matrices
  uint8_t* out = nullptr;
  int64_t first_row = 0, rows = 0, k = 0;
  int64_t first_matrix = 0, matrices = 1;
  int pair = 0;                          // tiles: 1 the gate, 2 the up matrix of a gated pair
  const int32_t* first_place = nullptr;  // of grouped rows: matrices that no row uses are skipped
};

// Dynamic shared memory of a block of `stream`: for each warp its part of the rows of x as f16 (rows start in different
// banks), then [warps][mats] sums of 16 x 8, and for each warp the squares and scales of up to 8 rows.
constexpr int64_t stream_row_bytes(int64_t tiles) { return tiles * 128 + 16; }
constexpr int64_t stream_tail_bytes(int64_t warps, int64_t mats) { return warps * (mats * 16 * 8 + 16) * 4; }

// Tiles that a warp of `stream` has in flight for each of its matrices, as many as its registers allow. If a longer row
// is laid out in parts, their length is a multiple of this; with two types, of both numbers.
constexpr int stream_depth(DType type, int mats) {
  const GpuFormat f = gpu_format(type);
  const int table = f.table_bytes() != 0 ? 5 : 0;
  const int words = (f.low_bits + f.high_bits + f.scale_bytes() / 32 + f.super_row_bytes() / 32 + table) * mats;
  const int depth = 36 / words;
  return depth < 1 ? 1 : depth > 4 ? 4 : depth;
}
constexpr int stream_depth(DType type, DType other, int mats) {
  return std::lcm(stream_depth(type, mats), stream_depth(other, mats));
}
// The minimum for a block with `columns` rows of x.
constexpr int64_t stream_least_bytes(DType type, DType other, int64_t columns, int64_t warps, int mats) {
  return warps * columns * half_passes(type) * stream_row_bytes(stream_depth(type, other, mats)) +
         stream_tail_bytes(warps, mats);
}

// ---- Launches. They neither synchronise nor allocate. --------------------------------------------------------------

// The norm of rows before the conversion to f16: x / sqrt(mean(x²) + eps)·weight (null: all ones), as Problem::normed.
struct RowNorm {
  bool normed = false;
  const float* weight = nullptr;
  float eps = 0;
};
// f32 rows -> f16 rows: `batch` groups of `rows` rows, row r of group b at x + b·x_batch_stride + r·x_stride (bytes);
// written to out + (b·rows + r)·format.row_bytes(k). x needs 8-byte alignment.
void halve_rows(HalfRows format, const uint8_t* x, int64_t x_stride, int64_t x_batch_stride, int64_t rows,
                int64_t batch, int64_t k, uint8_t* out, CUstream_st* stream, const RowNorm& norm = {});
// Sorts the rows of p.ids by matrix into p.groups and counts tiles of `tile_rows` rows. Zeroes the rows of p.y without
// a matrix.
void group_rows(const Problem& p, int tile_rows, CUstream_st* stream);
// group_rows(), and in the same launch halve_rows() of the `rows` rows p.x, in one batch and without a norm.
void halve_and_group(HalfRows format, const Problem& p, int64_t rows, int tile_rows, uint8_t* out, CUstream_st* stream);

// Unpacked tiles (w; for a gated pair w_up is only a flag) times f16 rows, in tiles of 128 by `rows_of_w`.
void gemm_unpacked(const Problem& p, bool bf16, int rows_of_w, int multiprocessors, CUstream_st* stream);

// Kernels of one weight type, in Layout::gpu unless said otherwise.
struct TypeKernels {
  // f32 x, up to 8 rows per block: `warps` (4, 8, 16) share the k of 1 or 2 stripes of w. Parts have the same type.
  void (*stream)(const Problem& p, int warps, int stripes, CUstream_st* stream) = nullptr;
  // f16 rows x: tiles of `tokens` (16, 32, 64, 128) rows of x and 32·warps rows of w (warps 4 or 8).
  void (*gemm_mma)(const Problem& p, int tokens, int warps, CUstream_st* stream) = nullptr;
  void (*gemm_wgmma)(const Problem& p, int tokens, int warps, CUstream_st* stream) = nullptr;
  // f16 rows x, dense: tiles of `tokens` (16, 32, 64, 128) rows of x and 128 rows of w; a cluster of `parts` blocks (2,
  // 4, 8, 16) shares k.
  void (*gemm_split)(const Problem& p, int tokens, int parts, CUstream_st* stream) = nullptr;
  // f32 x and plain weights, float32 sums in a fixed order.
  void (*exact)(const Problem& p, CUstream_st* stream) = nullptr;
  // Repacks plain weights to Layout::gpu on the device: `matrices` of [n, k], both contiguous.
  void (*repack)(const uint8_t* plain, uint8_t* out, int64_t matrices, int64_t n, int64_t k,
                 CUstream_st* stream) = nullptr;
  void (*unpack)(const UnpackJob& job, Unpacked form, CUstream_st* stream) = nullptr;
};
const TypeKernels& type_kernels(DType type);

// `stream` with a part of another type than p.type; for the pairs of mixed_types.def only.
void stream_mixed(const Problem& p, DType other, int warps, int stripes, CUstream_st* stream);

}  // namespace dyno::ops::cuda
