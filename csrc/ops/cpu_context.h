// The context of a CPU launch, in addition to its arguments. The counterpart of a CUDA stream, but synchronous.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device_info.h"
#include "core/numa_copies.h"
#include "core/thread_pool.h"

namespace dyno::ops {

struct CpuContext {
  static constexpr DeviceKind kDevice = DeviceKind::cpu;
  ThreadPool* pool = nullptr;
  int threads = 1;                // for this launch
  CpuIsa isa = CpuIsa::portable;  // kernels of this set or a lower one
  std::byte* scratch = nullptr;   // threads * scratch_per_thread bytes, 64-byte aligned
  size_t scratch_per_thread = 0;  // at least the largest scratch_bytes() of the planned ops
  // Of the weights on NUMA nodes, from which products read; null where there is one copy.
  const NumaCopies* copies = nullptr;
};

}  // namespace dyno::ops
