// Rings of products whose matrices have two types, for the pairs of mixed_types.def.
#include "ops/matmul/cuda/ring.cuh"

namespace dyno::ops::cuda {
#define DYNO_MIXED(a, b) \
  template void launch_ring<DType::a, DType::b>(const Problem& p, int, int, int, CUstream_st* stream);
#include "ops/matmul/cuda/mixed_types.def"
#undef DYNO_MIXED
}  // namespace dyno::ops::cuda
