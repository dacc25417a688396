// From weight types to their ring.
#include "core/error.h"
#include "ops/matmul/cuda/ring.h"

namespace dyno::ops::cuda {

void run_ring(const Problem& p, DType other, [[maybe_unused]] int share, [[maybe_unused]] int blocks,
              [[maybe_unused]] int multiprocessors, [[maybe_unused]] CUstream_st* stream) {
#define DYNO_BUILT_MIXED(a, b)                                                         \
  if (p.type == DType::a && other == DType::b) {                                       \
    return launch_ring<DType::a, DType::b>(p, share, blocks, multiprocessors, stream); \
  }
#define DYNO_BUILT_QUANT(name) DYNO_BUILT_MIXED(name, name)
#define DYNO_BUILT_GPU(name) DYNO_BUILT_MIXED(name, name)
#include "ops/built_types.inc"
  throw UnsupportedError(
      str_cat("[ring] ", dtype_name(p.type), " and ", dtype_name(other), " have no kernel in common"));
}

}  // namespace dyno::ops::cuda
