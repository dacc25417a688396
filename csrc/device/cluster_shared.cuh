// Clusters of blocks (sm_90): cluster barriers, and access to the shared memory of other blocks.
#pragma once

#include <cstdint>

namespace dyno::device {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int block_of_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}
// Every thread of every block must arrive and then wait. Writes before an arrival are visible after the wait.
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();  // the warp must be converged
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
// An arrival that orders accesses to shared memory only: those of this block, and loads from other blocks whose values
// were used. A normal arrival waits until writes to global memory are visible on the whole GPU.
__device__ __forceinline__ void cluster_arrive_shared() {
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
  __syncwarp();
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;\n" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#else
  cluster_arrive();  // the assembler has no such fence
#endif
}
// An arrival that orders only what barrier_init_done() released; a normal arrival waits until all writes are complete.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The address in block `rank` that corresponds to a shared address of this block.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int rank) {
  uint32_t out;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(out) : "r"(shared), "r"(rank));
  return out;
}
__device__ __forceinline__ float4 load_cluster_float4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];\n"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_cluster_float2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%2];\n" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float load_cluster_float(uint32_t address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_cluster_float(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;\n" ::"r"(address), "f"(v) : "memory");
}
// Writes 16 bytes to the shared memory of a block of the cluster; its barrier (device/mbarrier.cuh) counts them.
__device__ __forceinline__ void send_cluster_float4(uint32_t address, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];\n" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
#endif

}  // namespace dyno::device
