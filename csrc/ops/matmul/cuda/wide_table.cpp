// From a weight type to its kernel of gemm_wide.cuh.
#include "core/error.h"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

template <DType kType>
void gemm_wide_of(const Problem& p, const TiledRows& format, int tokens, int group, int multiprocessors,
                  CUstream_st* stream);

void gemm_wide(const Problem& p, const TiledRows& format, int tokens, int group, int multiprocessors,
               CUstream_st* stream) {
  switch (p.type) {
    case DType::f16:
      return gemm_wide_of<DType::f16>(p, format, tokens, group, multiprocessors, stream);
    case DType::bf16:
      return gemm_wide_of<DType::bf16>(p, format, tokens, group, multiprocessors, stream);
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return gemm_wide_of<DType::name>(p, format, tokens, group, multiprocessors, stream);
#define DYNO_GPU_TYPE(name, ...) \
  case DType::name:              \
    return gemm_wide_of<DType::name>(p, format, tokens, group, multiprocessors, stream);
#include "core/weight_types.def"
    default:
      throw UnsupportedError(str_cat("[matmul] type ", dtype_name(p.type), " has no CUDA kernel of wide tiles"));
  }
}

}  // namespace dyno::ops::cuda
