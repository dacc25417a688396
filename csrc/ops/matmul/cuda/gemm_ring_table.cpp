// From a weight type to its kernels of gemm_ring.cuh and gemm_codes.cuh.
#include "core/error.h"
#include "ops/matmul/cuda/gemm_ring.h"

namespace dyno::ops::cuda {

void throw_no_tile(const char* variant, int64_t rows, int64_t tokens) {
  throw UnsupportedError(str_cat("[", variant, "] no kernel has tiles of ", rows, " rows of w by ", tokens, " tokens"));
}

template <DType kType>
void gemm_ring(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

template <DType kType>
void gemm_codes(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

template <DType kType>
void gemm_codes_tiles(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

void run_gemm_codes(const Problem& p, [[maybe_unused]] const TiledRows& format,
                    [[maybe_unused]] const GemmRingShape& shape, [[maybe_unused]] CUstream_st* stream) {
  [[maybe_unused]] const bool tiles = shape.form != CodesForm::rows;
  switch (p.type) {
#define DYNO_BUILT_QUANT(name)                                                   \
  case DType::name:                                                              \
    if constexpr (has_half_tiles(DType::name, 128)) {                            \
      if (tiles) return gemm_codes_tiles<DType::name>(p, format, shape, stream); \
    }                                                                            \
    if constexpr (has_code_tiles(DType::name)) {                                 \
      if (!tiles) return gemm_codes<DType::name>(p, format, shape, stream);      \
    }                                                                            \
    break;
#include "ops/built_types.inc"
    default:
      break;
  }
  throw UnsupportedError(
      str_cat("[matmul] wgmma_codes reads q4_k, q5_k and q6_k, and f16 tiles with q4_k, not ", dtype_name(p.type)));
}

void run_gemm_ring(const Problem& p, [[maybe_unused]] const TiledRows& format,
                   [[maybe_unused]] const GemmRingShape& shape, [[maybe_unused]] CUstream_st* stream) {
  switch (p.type) {
#define DYNO_BUILT_QUANT(name) \
  case DType::name:            \
    return gemm_ring<DType::name>(p, format, shape, stream);
#define DYNO_BUILT_GPU(name) \
  case DType::name:          \
    return gemm_ring<DType::name>(p, format, shape, stream);
#include "ops/built_types.inc"
    default:
      throw UnsupportedError(str_cat("[matmul] wgmma_ring reads quantised weights, not ", dtype_name(p.type)));
  }
}

}  // namespace dyno::ops::cuda
