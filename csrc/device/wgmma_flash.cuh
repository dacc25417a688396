// Hopper's warpgroup products of flash attention (sm_90a): scores from two operands in shared memory; and weighted
// values from weights in registers and values in [key][dimension] order, which wgmma transposes.
//
// Panels have 64 columns: rows of 128 bytes in the 128-byte swizzle (16-byte chunk c of row r at c ^ (r & 7)). Panels
// start at multiples of 1024 bytes. d[nb·4 + i] as of mma.m16n8k16 for columns 8·nb; each warp has 16 of the 64 rows.
#pragma once

#include "device/wgmma.cuh"

namespace dyno::device {

#ifdef DYNO_DEVICE_WGMMA

// Descriptor of panels as the transposed right operand: 16 rows (keys) × 64 columns per panel, with panels
// `panel_bytes` apart.
__device__ __forceinline__ uint64_t wgmma_descriptor_transposed(uint32_t address, uint32_t panel_bytes) {
  return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | (static_cast<uint64_t>(panel_bytes >> 4) << 16) |
         (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

// Eight accumulators from d[i] on, as operands of an asm statement.
#define DYNO_D8(i)                                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DYNO_D32(i) DYNO_D8(i), DYNO_D8(i + 8), DYNO_D8(i + 16), DYNO_D8(i + 24)

// d[64, 64] = [d +] a[64, 16] · b[64, 16]ᵀ, both in shared memory.
#define DYNO_WGMMA_SCORES(type)                                                        \
  asm volatile(                                                                        \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                      \
      " {"                                                                             \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
      "}, %32, %33, add, 1, 1, 0, 0;\n}\n"                                             \
      : DYNO_D32(0)                                                                    \
      : "l"(a), "l"(b), "r"(add))
template <bool kBf16>
__device__ __forceinline__ void wgmma_scores(float (&d)[32], uint64_t a, uint64_t b, int add) {
  if constexpr (kBf16) {
    DYNO_WGMMA_SCORES("bf16");
  } else {
    DYNO_WGMMA_SCORES("f16");
  }
}
#undef DYNO_WGMMA_SCORES

// d[64, 64] += a[64, 16] · b[16, 64], a in registers, b by wgmma_descriptor_transposed().
#define DYNO_WGMMA_VALUES(type)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                      \
               " {"                                                                             \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "         \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                    \
               : DYNO_D32(0)                                                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool kBf16>
__device__ __forceinline__ void wgmma_values(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kBf16) {
    DYNO_WGMMA_VALUES("bf16");
  } else {
    DYNO_WGMMA_VALUES("f16");
  }
}
#undef DYNO_WGMMA_VALUES

// d[64, 128] = [d +] a[64, 16] · b[128, 16]ᵀ, both in shared memory.
#define DYNO_WGMMA_SCORES(type)                                                          \
  asm volatile(                                                                          \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, %64, %65, add, 1, 1, 0, 0;\n}\n"                                               \
      : DYNO_D32(0), DYNO_D32(32)                                                        \
      : "l"(a), "l"(b), "r"(add))
template <bool kBf16>
__device__ __forceinline__ void wgmma_scores(float (&d)[64], uint64_t a, uint64_t b, int add) {
  if constexpr (kBf16) {
    DYNO_WGMMA_SCORES("bf16");
  } else {
    DYNO_WGMMA_SCORES("f16");
  }
}
#undef DYNO_WGMMA_SCORES

// d[64, 128] += a[64, 16] · b[16, 128], a in registers, b by wgmma_descriptor_transposed().
#define DYNO_WGMMA_VALUES(type)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
               " {"                                                                               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"                                      \
               : DYNO_D32(0), DYNO_D32(32)                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool kBf16>
__device__ __forceinline__ void wgmma_values(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kBf16) {
    DYNO_WGMMA_VALUES("bf16");
  } else {
    DYNO_WGMMA_VALUES("f16");
  }
}
#undef DYNO_WGMMA_VALUES

// d[64, 256] += a[64, 16] · b[16, 256], a in registers, b by wgmma_descriptor_transposed().
#define DYNO_WGMMA_VALUES(type)                                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                     \
               " {"                                                                                             \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                         \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "               \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "               \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "               \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
               "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"                                               \
               : DYNO_D32(0), DYNO_D32(32), DYNO_D32(64), DYNO_D32(96)                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool kBf16>
__device__ __forceinline__ void wgmma_values(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (kBf16) {
    DYNO_WGMMA_VALUES("bf16");
  } else {
    DYNO_WGMMA_VALUES("f16");
  }
}
#undef DYNO_WGMMA_VALUES

// d[64, 128] += a[64, 16] · b[16, 128] for the 64 sums from d[kFirst] on, both operands in shared memory. ptxas
// compares an instruction's registers with the number that a thread has at its start; with 512 threads, this is too
// small for 128 sums.
#define DYNO_WGMMA_VALUES(type)                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
               " {"                                                                               \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
               "}, %64, %65, 1, 1, 1, 0, 1;\n"                                                    \
               : DYNO_D32(kFirst), DYNO_D32(kFirst + 32)                                          \
               : "l"(a), "l"(b))
template <bool kBf16, int kFirst>
__device__ __forceinline__ void wgmma_values_shared(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (kBf16) {
    DYNO_WGMMA_VALUES("bf16");
  } else {
    DYNO_WGMMA_VALUES("f16");
  }
}
#undef DYNO_WGMMA_VALUES

// d[64, 128] = [d +] a[64, 16] · b[16, 128], both in shared memory, b by wgmma_descriptor_transposed().
__device__ __forceinline__ void wgmma_columns(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, add, 1, 1, 0, 1;\n}\n"
      : DYNO_D32(0), DYNO_D32(32)
      : "l"(a), "l"(b), "r"(add));
}

#undef DYNO_D32
#undef DYNO_D8

#endif  // DYNO_DEVICE_WGMMA

}  // namespace dyno::device
