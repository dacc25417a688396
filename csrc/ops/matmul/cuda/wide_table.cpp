// From a weight type to its kernel of gemm_wide.cuh.
#include "core/error.h"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

template <DType kType>
void gemm_wide_of(const Problem& p, const TiledRows& format, int tokens, int group, int multiprocessors,
                  CUstream_st* stream);

void gemm_wide(const Problem& p, const TiledRows& format, int tokens, int group, int multiprocessors,
               CUstream_st* stream) {
#define DYNO_WIDE(type) \
  case DType::type:     \
    return gemm_wide_of<DType::type>(p, format, tokens, group, multiprocessors, stream);
  switch (p.type) {
    DYNO_WIDE(f16)
    DYNO_WIDE(bf16)
    DYNO_WIDE(q4_0)
    DYNO_WIDE(q4_1)
    DYNO_WIDE(q5_0)
    DYNO_WIDE(q5_1)
    DYNO_WIDE(q8_0)
    DYNO_WIDE(q2_k)
    DYNO_WIDE(q3_k)
    DYNO_WIDE(q4_k)
    DYNO_WIDE(q5_k)
    DYNO_WIDE(q6_k)
    DYNO_WIDE(iq4_nl)
    DYNO_WIDE(iq4_xs)
    DYNO_WIDE(mxfp4)
    default:
      throw UnsupportedError(str_cat("[matmul] type ", dtype_name(p.type), " has no CUDA kernel of wide tiles"));
  }
#undef DYNO_WIDE
}

}  // namespace dyno::ops::cuda
