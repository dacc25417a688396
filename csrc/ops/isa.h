// The boundary between ordinary code and kernels that are compiled once per instruction set.
//
// A kernel source defines its functions in DYNO_KERNEL_NAMESPACE (dyno::ops::portable, ::avx2, ::avx512_vnni) and is
// listed with dyno_add_isa_sources(). Ordinary code selects the namespace with DYNO_DISPATCH_ISA.
#pragma once

#include "core/device_info.h"

#ifdef DYNO_ISA_NS
#define DYNO_KERNEL_NAMESPACE dyno::ops::DYNO_ISA_NS
#endif

#ifdef DYNO_HAVE_ISA_portable
#define DYNO_CASE_PORTABLE(call) \
  case ::dyno::CpuIsa::portable: \
    portable::call;              \
    break;
#else
#define DYNO_CASE_PORTABLE(call)
#endif
#ifdef DYNO_HAVE_ISA_avx2
#define DYNO_CASE_AVX2(call) \
  case ::dyno::CpuIsa::avx2: \
    avx2::call;              \
    break;
#else
#define DYNO_CASE_AVX2(call)
#endif
#ifdef DYNO_HAVE_ISA_avx512_vnni
#define DYNO_CASE_AVX512(call)      \
  case ::dyno::CpuIsa::avx512_vnni: \
    avx512_vnni::call;              \
    break;
#else
#define DYNO_CASE_AVX512(call)
#endif

// DYNO_DECLARE_KERNELS(void rms_norm(args...);): declares kernels once per instruction set.
#define DYNO_DECLARE_KERNELS(...) \
  namespace dyno::ops {           \
  namespace portable {            \
  __VA_ARGS__                     \
  }                               \
  namespace avx2 {                \
  __VA_ARGS__                     \
  }                               \
  namespace avx512_vnni {         \
  __VA_ARGS__                     \
  }                               \
  }

// DYNO_DISPATCH_ISA(isa, rms_norm(args...)): calls the function of that name in the namespace of `isa`.
#define DYNO_DISPATCH_ISA(isa, ...) \
  switch (isa) {                    \
    DYNO_CASE_AVX512(__VA_ARGS__)   \
    DYNO_CASE_AVX2(__VA_ARGS__)     \
    DYNO_CASE_PORTABLE(__VA_ARGS__) \
    default:                        \
      break;                        \
  }
