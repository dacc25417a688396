// From a weight type to its kernels.
#include "core/error.h"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

#define DYNO_FLOAT_TYPE(name, ...) extern const TypeKernels kTypeKernels_##name;
#define DYNO_QUANT_TYPE(name, ...) extern const TypeKernels kTypeKernels_##name;
#define DYNO_GPU_TYPE(name, ...) extern const TypeKernels kTypeKernels_##name;
#include "core/weight_types.def"

const TypeKernels& type_kernels(DType type) {
  switch (type) {
#define DYNO_FLOAT_TYPE(name, ...) \
  case DType::name:                \
    return kTypeKernels_##name;
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return kTypeKernels_##name;
#define DYNO_GPU_TYPE(name, ...) \
  case DType::name:              \
    return kTypeKernels_##name;
#include "core/weight_types.def"
    default:
      throw UnsupportedError(str_cat("[matmul] type ", dtype_name(type), " has no CUDA kernels"));
  }
}

}  // namespace dyno::ops::cuda
