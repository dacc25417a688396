// Ring products whose matrices have two types, for the pairs of mixed_types.def.
#include "ops/matmul/cuda/ring.cuh"

namespace dyno::ops::cuda {
#define DYNO_BUILT_MIXED(a, b) \
  template void launch_ring<DType::a, DType::b>(const Problem& p, int, int, int, CUstream_st* stream);
#include "ops/built_types.inc"
}  // namespace dyno::ops::cuda
