// The CPU kernels of matmul, matmul_id, up_gate and moe_up_gate. They process tiles of 16 weight rows and token rows,
// independent of the family: every family's launch calls them, and then an epilogue. One set per instruction set
// (ops/isa.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "ops/isa.h"
#include "ops/op.h"

namespace dyno::ops {

// 16 consecutive rows of a weight matrix. In layout plain, the last tile of a matrix may have only `rows` of them.
struct WeightTile {
  const std::byte* base = nullptr;
  int64_t row_bytes = 0;  // layout plain
  int rows = 16;
};

// c[t * ldc + 16 * i + r] = sum over k of tile[i] row r times token row t. Sums run over k in order, 32 (or 16) values
// at a time, in every kernel and with every parameter below, so results do not depend on the configuration.
struct ProductJob {
  DType type = DType::f32;
  Layout layout = Layout::plain;
  int64_t k = 0;
  const WeightTile* tiles = nullptr;
  int n_tiles = 0;
  const std::byte* const* rows = nullptr;  // m token rows: q8, or f32 for dot
  int m = 0;
  float* c = nullptr;
  int64_t ldc = 0;
  std::byte* scratch = nullptr;  // 64-byte aligned
  int nr = 1;                    // gemm: tiles of a register tile, 1, 2 or 4
  int tokens = 1;                // gemm, dot: tokens of a register tile
  int weight_rows = 4;           // dot: weight rows of a register tile
  int kc = 256;                  // gemm: k unpacked at a time, a multiple of 256
  int prefetch = 0;              // matvec, layout x16: prefetch distance in bytes, to the second-level cache
  int64_t next_bytes = 0;        // gemm, layout x16: distance from a tile to its successor in the next task, or 0
};

// Scratch of gemm: `nr` unpacked tiles of kc columns with their scales.
static constexpr size_t gemm_scratch_bytes(int nr, int kc) {
  return static_cast<size_t>(nr) * static_cast<size_t>(kc) * (16 + 2 * sizeof(float));
}
// Scratch of dot for quantised types: 16 rows as floats.
static constexpr size_t dot_scratch_bytes(int64_t k) { return static_cast<size_t>(k) * 16 * sizeof(float); }

struct LinearEpilogue {
  const float* c = nullptr;
  int64_t ldc = 0;
  int m = 0;
  int columns = 0;  // columns of c that exist
  const float* bias = nullptr;
  const float* const* residual = nullptr;  // m rows, or null
  float scale = 1.0f;
  float* const* y = nullptr;  // m rows
};

struct GateEpilogue {
  const float* gate = nullptr;
  const float* up = nullptr;
  int64_t ldc = 0;  // of both products
  int m = 0;
  int columns = 0;
  const float* bias_gate = nullptr;
  const float* bias_up = nullptr;
  float scale_gate = 1.0f, scale_up = 1.0f;  // before the bias
  Activation activation = Activation::silu;
  float* const* y = nullptr;
};

#define DYNO_DECLARE_MATMUL_KERNELS(isa)                                                                        \
  namespace isa {                                                                                               \
  void gemm_q8(const ProductJob& job);                                                                          \
  void gemm_q8_coded(const ProductJob& job);                                                                    \
  void matvec_q8_x16(const ProductJob& job);                                                                    \
  void matvec_q8_coded(const ProductJob& job);                                                                  \
  void matvec_q8_plain(const ProductJob& job);                                                                  \
  void dot_f32(const ProductJob& job);                                                                          \
  void epilogue_linear(const LinearEpilogue& e);                                                                \
  void epilogue_gate(const GateEpilogue& e);                                                                    \
  /* tiles [first, first + count) of a plain matrix of `rows` rows into layout x16 */                           \
  void repack_tiles(DType type, const std::byte* plain, std::byte* out, int64_t rows, int64_t k, int64_t first, \
                    int64_t count);                                                                             \
  /* `rows` <= 16 rows of one tile as floats, out[r * stride + k] */                                            \
  void tile_to_f32(DType type, Layout layout, const WeightTile& tile, int64_t k, float* out, int64_t stride);   \
  }
#ifdef DYNO_HAVE_ISA_portable
DYNO_DECLARE_MATMUL_KERNELS(portable)
#endif
#ifdef DYNO_HAVE_ISA_avx2
DYNO_DECLARE_MATMUL_KERNELS(avx2)
#endif
#ifdef DYNO_HAVE_ISA_avx512_vnni
DYNO_DECLARE_MATMUL_KERNELS(avx512_vnni)
#endif
#ifdef DYNO_ISA_NS
// A kernel source may not have the folder-wide definitions above.
DYNO_DECLARE_MATMUL_KERNELS(DYNO_ISA_NS)
#endif

}  // namespace dyno::ops
