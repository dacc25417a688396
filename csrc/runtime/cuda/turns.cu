#include "runtime/cuda/turns.h"

#include "core/cuda/launch.h"
#include "device/dependent.cuh"

namespace dyno::runtime {
namespace {

constexpr int kThreads = 512;

// Host memory is read without caches, because it changes between two replays.
__device__ __forceinline__ void cross(const Crossings& rows) {
  for (int r = 0; r < rows.count; ++r) {
    const Crossing& one = rows.rows[r];
    const auto bits = reinterpret_cast<uintptr_t>(one.from) | reinterpret_cast<uintptr_t>(one.to) | one.bytes;
    if (bits % sizeof(uint4) == 0) {
      for (size_t i = threadIdx.x; i < one.bytes / sizeof(uint4); i += kThreads) {
        reinterpret_cast<uint4*>(one.to)[i] = __ldcv(reinterpret_cast<const uint4*>(one.from) + i);
      }
    } else {
      for (size_t i = threadIdx.x; i < one.bytes; i += kThreads) {
        one.to[i] = static_cast<std::byte>(__ldcv(reinterpret_cast<const unsigned char*>(one.from) + i));
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) send_rows_kernel(const Crossings rows, uint32_t* count, uint32_t* seen) {
  device::let_next_start();
  device::wait_for_previous();
  cross(rows);
  if (seen == nullptr) return;
  __threadfence_system();  // every thread's rows arrive before the count
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t turn = ++*count;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(seen), "r"(turn) : "memory");
  }
}

__global__ void __launch_bounds__(kThreads)
    receive_rows_kernel(const Crossings rows, uint32_t* count, const uint32_t* ready) {
  // The next launches start and load their weights while the CPU computes.
  device::let_next_start();
  device::wait_for_previous();
  if (ready != nullptr) {
    if (threadIdx.x == 0) {
      const uint32_t turn = ++*count;
      uint32_t over = 0;
      do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(over) : "l"(ready) : "memory");
      } while (static_cast<int32_t>(over - turn) < 0);
    }
    __syncthreads();
  }
  cross(rows);
}

}  // namespace

void send_rows(const Crossings& rows, uint32_t* count, uint32_t* seen, CUstream_st* stream) {
  launch_dependent("send_rows", send_rows_kernel, 1, kThreads, 0, stream, rows, count, seen);
}

void receive_rows(const Crossings& rows, uint32_t* count, const uint32_t* ready, CUstream_st* stream) {
  launch_dependent("receive_rows", receive_rows_kernel, 1, kThreads, 0, stream, rows, count, ready);
}

}  // namespace dyno::runtime
