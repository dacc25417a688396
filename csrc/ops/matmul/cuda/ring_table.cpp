// From weight types to their ring.
#include "core/error.h"
#include "ops/matmul/cuda/ring.h"

namespace dyno::ops::cuda {

#define DYNO_RING_TYPES(X) \
  X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(iq4_xs) X(mxfp4)

void run_ring(const Problem& p, DType other, int share, int blocks, int multiprocessors, CUstream_st* stream) {
#define DYNO_MIXED(a, b)                                                               \
  if (p.type == DType::a && other == DType::b) {                                       \
    return launch_ring<DType::a, DType::b>(p, share, blocks, multiprocessors, stream); \
  }
#define DYNO_SAME(a) DYNO_MIXED(a, a)
  DYNO_RING_TYPES(DYNO_SAME)
#include "ops/matmul/cuda/mixed_types.def"
#undef DYNO_SAME
#undef DYNO_MIXED
  throw UnsupportedError(
      str_cat("[ring] ", dtype_name(p.type), " and ", dtype_name(other), " have no kernel in common"));
}

}  // namespace dyno::ops::cuda
