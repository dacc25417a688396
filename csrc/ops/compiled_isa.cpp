// Reports the instruction set for which the kernels of this namespace were compiled (`dyno info`, tests).
#include "ops/isa.h"

namespace DYNO_KERNEL_NAMESPACE {

const char* compiled_isa() {
#if defined(__AVX512VNNI__)
  return "avx512_vnni";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}

}  // namespace DYNO_KERNEL_NAMESPACE
