#include "ops/matmul/gemm_q8.h"

namespace DYNO_KERNEL_NAMESPACE {

void gemm_q8(const ProductJob& job) {
  switch (job.type) {
#define DYNO_QUANT_TYPE(name, ...)                             \
  case DType::name:                                            \
    if (job.layout == Layout::x16) {                           \
      gemm_typed<TileSource<DType::name, Layout::x16>>(job);   \
    } else {                                                   \
      gemm_typed<TileSource<DType::name, Layout::plain>>(job); \
    }                                                          \
    break;
#include "core/weight_types.def"
    default:
      break;
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
