// Barriers in shared memory between the warps that fill it and the warps that read it (sm_90), barriers of some warps
// of a block, and register allocation between warpgroups (sm_90a).
#pragma once

#include <cstdint>

namespace dyno::device {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}\n" ::"r"(barrier) : "memory");
}
// Arrives; the phase completes only after this many bytes have arrived from copies or other blocks.
__device__ __forceinline__ void barrier_arrive_for_bytes(uint32_t barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
#else
  (void)barrier, (void)bytes;
#endif
}
// Arrives when all earlier cp.async copies of this thread are in shared memory.
__device__ __forceinline__ void barrier_arrive_copied(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase with this parity. The phase before the first one counts as complete, with parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  (void)barrier, (void)parity;
#endif
}

// Increments a number in shared memory, which is 0 again after `most`, and returns its previous value. A thread that
// counts later sees all writes that other threads made before they counted.
__device__ __forceinline__ uint32_t count_up_to(uint32_t number, uint32_t most) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared::cta.inc.u32 %0, [%1], %2;\n"
               : "=r"(before)
               : "r"(number), "r"(most)
               : "memory");
  return before;
}

// Barrier `id` (1 to 15; 0 is __syncthreads) for `threads` threads of the block.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Releases registers of this warpgroup, or acquires released ones.
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
#endif

}  // namespace dyno::device
