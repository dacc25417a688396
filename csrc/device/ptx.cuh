// Thin wrappers for the PTX instructions of the matrix kernels, with portable versions for chips without an
// instruction.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace dyno::device {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes from global memory to a shared address, or writes zeros if !valid. An ordinary copy before sm_80.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, bool valid) {
#if __CUDA_ARCH__ >= 800
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
#else
  const uint4 v = valid ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};\n" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#endif
}
__device__ __forceinline__ void copy_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}
// Waits until at most kPending of this thread's groups are pending.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
#endif
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];\n" ::"l"(p)); }

// Bypasses L1, which may have stale data.
__device__ __forceinline__ int32_t load_l2(const int32_t* p) {
  int32_t v;
  asm volatile("ld.global.cg.s32 %0, [%1];\n" : "=r"(v) : "l"(p));
  return v;
}

// Loads of data that is read once, so that it does not evict other data from L1.
__device__ __forceinline__ uint4 load_stream_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_stream_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t load_stream_4(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];\n" : "=r"(v) : "l"(p));
  return v;
}

// Loads four 8x8 matrices of 16-bit elements; lane i provides the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c[16, 8] += a[16, 16] · b[16, 8], f16 with float32 sums.
__device__ __forceinline__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// c[16, 8] += a[16, 32] · b[32, 8], bytes with integer sums: signed in b, and of `type` (s8 or u8) in a. Chips before
// 8.0 have this product with half of k and 8 rows.
#if __CUDA_ARCH__ >= 800
#define DYNO_MMA_BYTES(type)                                                     \
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." type                     \
               ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" \
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
#else
#define DYNO_MMA_BYTES(type)                                                                            \
  _Pragma("unroll") for (int i = 0; i < 4; ++i) {                                                       \
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32." type ".s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};\n" \
                 : "+r"(c[i % 2 * 2]), "+r"(c[i % 2 * 2 + 1])                                           \
                 : "r"(a[i]), "r"(i < 2 ? b0 : b1));                                                    \
  }
#endif
__device__ __forceinline__ void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  DYNO_MMA_BYTES("s8");
}
__device__ __forceinline__ void mma_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  DYNO_MMA_BYTES("u8");
}
#undef DYNO_MMA_BYTES

// Byte i of the result is the byte of {low, high} with the number in nibble i of `which`. If the nibble is 8 or more,
// it is 0 or 255: the sign of byte (nibble − 8).
__device__ __forceinline__ uint32_t permute_or_sign(uint32_t low, uint32_t high, uint32_t which) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(out) : "r"(low), "r"(high), "r"(which));
  return out;
}

__device__ __forceinline__ uint32_t as_bits(__half2 v) { return *reinterpret_cast<const uint32_t*>(&v); }
__device__ __forceinline__ __half2 as_half2(uint32_t v) { return *reinterpret_cast<const __half2*>(&v); }

// The larger number, or NaN if one of them is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float out;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a > b || a != a ? a : b;
#endif
}

// (a & b) | c in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Packs two floats as f16; finite values beyond the range become ±65504 (NaN stays NaN).
__device__ __forceinline__ uint32_t pack_half2(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t out;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;\n" : "=r"(out) : "f"(high), "f"(low));
  return out;
#else
  constexpr float kMax = 65504.0f;
  low = fabsf(low) > kMax ? copysignf(kMax, low) : low;
  high = fabsf(high) > kMax ? copysignf(kMax, high) : high;
  return as_bits(__floats2half2_rn(low, high));
#endif
}

}  // namespace dyno::device
