// Maps a weight type to its kernels of gemm_wide.cuh and gemm_sorted.cuh.
#include "core/error.h"
#include "ops/matmul/cuda/sorted.h"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

template <DType kType>
void gemm_wide_of(const Problem& p, const TiledRows& format, int group, int multiprocessors, CUstream_st* stream);
template <DType kType>
void gemm_sorted_of(const Problem& p, const SortedRows& format, int multiprocessors, CUstream_st* stream);

namespace {

// Calls start<type>().
template <typename Start>
void with_wide_type(DType type, [[maybe_unused]] const Start& start) {
  switch (type) {
#define DYNO_CASE(name) \
  case DType::name:     \
    return start.template operator()<DType::name>();
#define DYNO_BUILT_QUANT(name) DYNO_CASE(name)
#define DYNO_BUILT_GPU(name) DYNO_CASE(name)
// Float types with layout gpu.
#define DYNO_BUILT_FLOAT(name)                         \
  case DType::name:                                    \
    if constexpr (has_gpu_layout(DType::name)) {       \
      return start.template operator()<DType::name>(); \
    }                                                  \
    break;
#include "ops/built_types.inc"
#undef DYNO_CASE
    default:
      break;
  }
  throw UnsupportedError(str_cat("[matmul] type ", dtype_name(type), " has no CUDA kernel of wide tiles"));
}

}  // namespace

void gemm_wide(const Problem& p, const TiledRows& format, int group, int multiprocessors, CUstream_st* stream) {
  with_wide_type(p.type, [&]<DType kType>() { gemm_wide_of<kType>(p, format, group, multiprocessors, stream); });
}

void gemm_sorted(const Problem& p, const SortedRows& format, int multiprocessors, CUstream_st* stream) {
  with_wide_type(p.type, [&]<DType kType>() { gemm_sorted_of<kType>(p, format, multiprocessors, stream); });
}

}  // namespace dyno::ops::cuda
