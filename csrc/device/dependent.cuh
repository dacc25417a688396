// Programmatic dependent launch: a kernel may start while the previous one still runs, which hides its start and the
// loading of its weights. Below sm_90 both functions do nothing.
//
// A kernel that core/cuda/launch.h starts must call wait_for_previous() in every thread before it reads or writes
// memory that an earlier launch uses. Only after that call has the earlier launch completed and are its writes visible.
// Weights may be read before.
#pragma once

namespace dyno::device {

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// When all blocks have called this (or ended), blocks of the next launch may use the remaining resources.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace dyno::device
