// Kernels of family copy, one set per instruction set.
#pragma once

#include <cstdint>

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {

#define DYNO_DECLARE_COPY_KERNELS(isa)                                                         \
  namespace isa {                                                                              \
  void quantize_rows_q8(const CopyArgs& args, int64_t k, int64_t first_row, int64_t last_row); \
  }
#ifdef DYNO_HAVE_ISA_portable
DYNO_DECLARE_COPY_KERNELS(portable)
#endif
#ifdef DYNO_HAVE_ISA_avx2
DYNO_DECLARE_COPY_KERNELS(avx2)
#endif
#ifdef DYNO_HAVE_ISA_avx512_vnni
DYNO_DECLARE_COPY_KERNELS(avx512_vnni)
#endif
#ifdef DYNO_ISA_NS
DYNO_DECLARE_COPY_KERNELS(DYNO_ISA_NS)
#endif

}  // namespace dyno::ops
