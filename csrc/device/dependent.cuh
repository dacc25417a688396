// Programmatic dependent launch: a kernel may start while the one before it still runs, so that its start and the
// loading of its weights cost no time of their own. Below sm_90 both are nothing.
//
// A kernel that core/cuda/launch.h starts calls wait_for_previous() in every thread, before it reads or writes memory
// that an earlier launch touches: only then is that one over and its writes are seen. Weights may be read before.
#pragma once

namespace dyno::device {

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Once all blocks have called it (or ended), blocks of the next launch may take the room that is left.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace dyno::device
