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

void run_gemm_codes(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  switch (p.type) {
    case DType::q4_k:
      return gemm_codes<DType::q4_k>(p, format, shape, stream);
    case DType::q5_k:
      return gemm_codes<DType::q5_k>(p, format, shape, stream);
    case DType::q6_k:
      return gemm_codes<DType::q6_k>(p, format, shape, stream);
    default:
      throw UnsupportedError(str_cat("[matmul] wgmma_codes reads q4_k, q5_k and q6_k, not ", dtype_name(p.type)));
  }
}

void run_gemm_ring(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  switch (p.type) {
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return gemm_ring<DType::name>(p, format, shape, stream);
#define DYNO_GPU_TYPE(name, ...) \
  case DType::name:              \
    return gemm_ring<DType::name>(p, format, shape, stream);
#include "core/weight_types.def"
    default:
      throw UnsupportedError(str_cat("[matmul] wgmma_ring reads quantised weights, not ", dtype_name(p.type)));
  }
}

}  // namespace dyno::ops::cuda
