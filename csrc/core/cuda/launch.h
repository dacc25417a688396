// Starts a kernel that uses device/dependent.cuh. With programmatic dependent launch, it may begin before the previous
// launch of the stream has ended; chips or code without this feature use an ordinary launch. Works inside graph
// capture.
#pragma once

#include <cuda_runtime.h>

#include "core/cuda/check.h"

namespace dyno {

// Whether the code for the current device was compiled for sm_90 or later. Code for older chips that the driver
// translates does not have the wait instruction, even on a newer chip.
bool has_dependent_launch();

// Throws DeviceError if the launch fails. `op` is the name of the family.
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
