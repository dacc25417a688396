// Starts a kernel that follows device/dependent.cuh: on chips and code that know programmatic dependent launch it may
// begin before the previous launch of the stream has ended, else it is an ordinary launch. Can be captured in a graph.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.h"

namespace dyno {

// Whether the code that the current device runs was compiled for sm_90 or later. Code for older chips that the driver
// translates lacks the instruction that waits, even on a newer chip.
bool has_dependent_launch();

// Throws DeviceError when the launch fails. `op` is the name of the family.
template <typename... Params, typename... Args>
void launch_dependent(const char* op, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                      cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = has_dependent_launch() ? 1 : 0;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), op, __FILE__, __LINE__);
}

}  // namespace dyno
