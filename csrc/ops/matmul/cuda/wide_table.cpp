// Maps a weight type to its kernel of gemm_wide.cuh.
#include "core/error.h"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

template <DType kType>
void gemm_wide_of(const Problem& p, const TiledRows& format, int tokens, int group, int multiprocessors,
                  CUstream_st* stream);

void gemm_wide(const Problem& p, [[maybe_unused]] const TiledRows& format, [[maybe_unused]] int tokens,
               [[maybe_unused]] int group, [[maybe_unused]] int multiprocessors, [[maybe_unused]] CUstream_st* stream) {
  switch (p.type) {
#define DYNO_CASE(name) \
  case DType::name:     \
    return gemm_wide_of<DType::name>(p, format, tokens, group, multiprocessors, stream);
#define DYNO_BUILT_QUANT(name) DYNO_CASE(name)
#define DYNO_BUILT_GPU(name) DYNO_CASE(name)
// Float types with layout gpu.
#define DYNO_BUILT_FLOAT(name)                                                             \
  case DType::name:                                                                        \
    if constexpr (has_gpu_layout(DType::name)) {                                           \
      return gemm_wide_of<DType::name>(p, format, tokens, group, multiprocessors, stream); \
    }                                                                                      \
    break;
#include "ops/built_types.inc"
#undef DYNO_CASE
    default:
      break;
  }
  throw UnsupportedError(str_cat("[matmul] type ", dtype_name(p.type), " has no CUDA kernel of wide tiles"));
}

}  // namespace dyno::ops::cuda
