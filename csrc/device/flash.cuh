// Instructions of attention in addition to ptx.cuh: transposed matrix loads, bfloat16 products, packing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace dyno::device {

// load_matrix_x4() with each 8x8 matrix transposed.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements that is distributed over the warp, two adjacent elements of a row per
// lane.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t v) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(out) : "r"(v));
  return out;
}

// Loads 16 bytes that are not kept in L1; if they are not aligned, in words of 2 bytes.
__device__ __forceinline__ uint4 load_16(const uint8_t* p, bool aligned) {
  uint4 v;
  if (aligned) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
  }
  const auto* h = reinterpret_cast<const uint16_t*>(p);
  const auto word = [&](int i) { return h[2 * i] | static_cast<uint32_t>(h[2 * i + 1]) << 16; };
  return {word(0), word(1), word(2), word(3)};
}

// c[16, 8] += a[16, 16] · b[16, 8], bf16 with float32 sums. Chips before sm_80 do not have the instruction, and no
// kernel calls this there.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  (void)c, (void)a, (void)b0, (void)b1;
  __trap();
#endif
}

// The same with f16 sums, two in a register; twice as fast on GeForce chips.
__device__ __forceinline__ void mma_f16_half_sums(uint32_t (&c)[2], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%0,%1};\n"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};\n"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3}, {%4}, {%0,%1};\n"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// Packs two floats as f16 or bf16 in a register, the first one in the low bits.
template <bool kBf16>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  if constexpr (kBf16) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}

// The same; values beyond the f16 range become its largest finite values.
template <bool kBf16>
__device__ __forceinline__ uint32_t pack2_finite(float low, float high) {
  if constexpr (kBf16) {
    return pack2<true>(low, high);
  } else {
    return pack_half2(low, high);
  }
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dyno::device
