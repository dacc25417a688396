// From a weight type to its kernel of gemm_ring.cuh.
#include "core/error.h"
#include "ops/matmul/cuda/gemm_ring.h"

namespace dyno::ops::cuda {

template <DType kType>
void gemm_ring(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream);

void run_gemm_ring(const Problem& p, const TiledRows& format, const GemmRingShape& shape, CUstream_st* stream) {
  switch (p.type) {
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return gemm_ring<DType::name>(p, format, shape, stream);
#include "core/weight_types.def"
    default:
      throw UnsupportedError(str_cat("[matmul] wgmma_ring reads quantised weights, not ", dtype_name(p.type)));
  }
}

}  // namespace dyno::ops::cuda
