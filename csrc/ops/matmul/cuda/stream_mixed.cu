// Streaming products whose matrices have two types, for the pairs of mixed_types.def.
#include "core/error.h"
#include "ops/matmul/cuda/stream.cuh"

namespace dyno::ops::cuda {

void stream_mixed(const Problem& p, DType other, [[maybe_unused]] int warps, [[maybe_unused]] int stripes,
                  [[maybe_unused]] CUstream_st* stream) {
#define DYNO_BUILT_MIXED(a, b)                                               \
  if (p.type == DType::a && other == DType::b) {                             \
    return stream_mixed_pair<DType::a, DType::b>(p, warps, stripes, stream); \
  }
#include "ops/built_types.inc"
  throw UnsupportedError(str_cat("[qkv] ", dtype_name(p.type), " and ", dtype_name(other), " have no common kernel"));
}

}  // namespace dyno::ops::cuda
