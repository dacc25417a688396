// Bulk copies of contiguous bytes from global to shared memory by the multiprocessor's copy engine (sm_90). One thread
// issues the copy, and a barrier of device/mbarrier.cuh counts the bytes that have arrived.
#pragma once

#include <cstdint>

#include "device/mbarrier.cuh"

namespace dyno::device {

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void barrier_init_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
}

// Policy for data that is read once: L2 evicts it first.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
#endif
  return policy;
}

// For a barrier that already expects the bytes.
__device__ __forceinline__ void bulk_copy_expected(uint32_t shared, const void* global, uint32_t bytes,
                                                   uint32_t barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
#else
  (void)shared, (void)global, (void)bytes, (void)barrier, (void)policy;
#endif
}

// `bytes` and both addresses must be multiples of 16. A barrier with one expected arrival completes its phase when the
// bytes have arrived.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
#if __CUDA_ARCH__ >= 900
  barrier_arrive_for_bytes(barrier, bytes);
  bulk_copy_expected(shared, global, bytes, barrier, policy);
#else
  (void)shared, (void)global, (void)bytes, (void)barrier, (void)policy;
#endif
}

// The same for data that other blocks read as well.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  barrier_arrive_for_bytes(barrier, bytes);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
#else
  (void)shared, (void)global, (void)bytes, (void)barrier;
#endif
}

}  // namespace dyno::device
