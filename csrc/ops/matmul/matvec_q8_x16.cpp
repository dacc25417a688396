#include "ops/matmul/matvec_q8.h"

namespace DYNO_KERNEL_NAMESPACE {

void matvec_q8_x16(const ProductJob& job) {
  switch (job.type) {
#define DYNO_QUANT_TYPE(name, ...) \
  case DType::name:                \
    return matvec_typed<TileSource<DType::name, Layout::x16>>(job);
#include "core/weight_types.def"
    default:
      break;
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
