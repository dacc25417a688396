// Clusters of blocks, as the words of csrc/device/cluster_shared.cuh: one emulated block has the threads of all blocks
// of a cluster, and each block a stretch of the emulated shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dyno::device {

inline constexpr uint32_t kBlockStretch = 1 << 18;  // bytes of shared memory

inline void cluster_arrive() {}
inline void cluster_wait() { emulated::whole.wait(emulated::threads.x); }

inline uint32_t cluster_address(uint32_t shared, int rank) {
  return shared % kBlockStretch + static_cast<uint32_t>(rank) * kBlockStretch;
}
template <typename T>
T load_cluster(uint32_t address) {
  T v;
  std::memcpy(&v, emulated::shared_memory + address, sizeof(T));
  return v;
}
inline float4 load_cluster_float4(uint32_t address) { return load_cluster<float4>(address); }

}  // namespace dyno::device
