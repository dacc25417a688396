#include "ops/matmul/matvec_q8.h"

namespace DYNO_KERNEL_NAMESPACE {

void matvec_q8_x16(const ProductJob& job) { matvec<Layout::x16>(job); }

}  // namespace DYNO_KERNEL_NAMESPACE
