// Maps a weight type to its kernels.
#include "core/error.h"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

#define DYNO_BUILT_FLOAT(name) extern const TypeKernels kTypeKernels_##name;
#define DYNO_BUILT_QUANT(name) extern const TypeKernels kTypeKernels_##name;
#define DYNO_BUILT_GPU(name) extern const TypeKernels kTypeKernels_##name;
#include "ops/built_types.inc"

const TypeKernels& type_kernels(DType type) {
  switch (type) {
#define DYNO_BUILT_FLOAT(name) \
  case DType::name:            \
    return kTypeKernels_##name;
#define DYNO_BUILT_QUANT(name) \
  case DType::name:            \
    return kTypeKernels_##name;
#define DYNO_BUILT_GPU(name) \
  case DType::name:          \
    return kTypeKernels_##name;
#include "ops/built_types.inc"
    default:
      throw UnsupportedError(str_cat("[matmul] type ", dtype_name(type), " has no CUDA kernels"));
  }
}

}  // namespace dyno::ops::cuda
