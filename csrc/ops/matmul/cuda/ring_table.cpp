// From weight types to their ring.
#include "core/error.h"
#include "ops/matmul/cuda/ring.h"

namespace dyno::ops::cuda {

void run_ring(const Problem& p, DType other, int share, int blocks, int multiprocessors, CUstream_st* stream) {
#define DYNO_MIXED(a, b)                                                               \
  if (p.type == DType::a && other == DType::b) {                                       \
    return launch_ring<DType::a, DType::b>(p, share, blocks, multiprocessors, stream); \
  }
#define DYNO_QUANT_TYPE(name, ...) DYNO_MIXED(name, name)
#define DYNO_GPU_TYPE(name, ...) DYNO_MIXED(name, name)
#include "core/weight_types.def"
#include "ops/matmul/cuda/mixed_types.def"
#undef DYNO_MIXED
  throw UnsupportedError(
      str_cat("[ring] ", dtype_name(p.type), " and ", dtype_name(other), " have no kernel in common"));
}

}  // namespace dyno::ops::cuda
