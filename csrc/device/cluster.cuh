// Clusters of blocks (Hopper): rank of a block, barriers of other blocks, and copies to several blocks.
#pragma once

#include "device/wgmma_shared.cuh"

namespace dyno::device {

#ifdef DYNO_DEVICE_WGMMA

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}
// Synchronises all threads of all blocks of the cluster, and orders their earlier writes to shared memory.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
// Arrives at the barrier at shared address `barrier` in block `rank`. Orders this block's earlier operations, so it can
// signal that shared memory is no longer read.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// One arrival; the phase completes only after this many bytes have been copied.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// copy_bulk() to every block in `blocks` (bit i: rank i), at the same shared address, counted by the barrier at the
// same address there.
__device__ __forceinline__ void copy_bulk_to(uint16_t blocks, uint32_t shared, const void* global, uint32_t bytes,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;\n" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}
// Synchronises kThreads threads of this block at hardware barrier `id` (1 to 15).
template <int kThreads>
__device__ __forceinline__ void meet(int id) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "n"(kThreads) : "memory");
}

#endif  // DYNO_DEVICE_WGMMA

}  // namespace dyno::device
