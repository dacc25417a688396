#include "ops/matmul/matvec_q8.h"

namespace DYNO_KERNEL_NAMESPACE {

void matvec_q8_plain(const ProductJob& job) { matvec<Layout::plain>(job); }

}  // namespace DYNO_KERNEL_NAMESPACE
