// Checks of CUDA calls. An error becomes an exception with the expression, the error's name and text, and file:line;
// the runtime's last-error state is cleared, so that a caught error does not show up in a later call.
#pragma once

#include <cuda_runtime.h>

namespace dyno {

// Throws OutOfMemoryError for cudaErrorMemoryAllocation, DeviceError for anything else that is no success.
void cuda_check(cudaError_t status, const char* expression, const char* file, int line);
// For destructors: writes the same message to stderr.
void cuda_check_nothrow(cudaError_t status, const char* expression, const char* file, int line) noexcept;

}  // namespace dyno

#define DYNO_CUDA_CHECK(expression) ::dyno::cuda_check((expression), #expression, __FILE__, __LINE__)
#define DYNO_CUDA_CHECK_NOTHROW(expression) ::dyno::cuda_check_nothrow((expression), #expression, __FILE__, __LINE__)
// After every launch: `op` is the name of the family.
#define DYNO_LAUNCH_CHECK(op) ::dyno::cuda_check(cudaPeekAtLastError(), "launch of " op, __FILE__, __LINE__)
