// From a weight type to its kernels.
#include "core/error.h"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

#define DYNO_CUDA_TYPES(X) \
  X(f32)                   \
  X(f16)                   \
  X(bf16) X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(iq4_xs) X(mxfp4)

#define DYNO_DECLARE(type) extern const TypeKernels kTypeKernels_##type;
DYNO_CUDA_TYPES(DYNO_DECLARE)
#undef DYNO_DECLARE

const TypeKernels& type_kernels(DType type) {
  switch (type) {
#define DYNO_CASE(t) \
  case DType::t:     \
    return kTypeKernels_##t;
    DYNO_CUDA_TYPES(DYNO_CASE)
#undef DYNO_CASE
    default:
      throw UnsupportedError(str_cat("[matmul] type ", dtype_name(type), " has no CUDA kernels"));
  }
}

}  // namespace dyno::ops::cuda
