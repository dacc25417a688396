// Checks of CUDA calls. An error becomes an exception with the expression, the error's name and text, and file:line.
// The runtime's last-error state is cleared, so that a caught error does not appear in a later call. An error that
// makes the device's context unusable is recorded (core/device_loss.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dyno {

// Throws OutOfMemoryError for cudaErrorMemoryAllocation, DeviceLostError for an error that ends the use of the device
// by this process, and DeviceError for any other failure.
void cuda_check(cudaError_t status, const char* expression, const char* file, int line);
// For destructors: writes the same message to stderr, unless the device is lost and that was already reported.
void cuda_check_nothrow(cudaError_t status, const char* expression, const char* file, int line) noexcept;
// For a failure that another library reports: throws if the device itself does not answer.
void check_device_answers(const char* expression, const char* file, int line);

// Whether an error ends the use of its device by this process. `unclear`: the error code can also mean a temporary
// state.
enum class Loss : uint8_t { no, unclear, yes };
Loss loss_of(cudaError_t status);

// The device and the current step of the calling thread, for error messages. Steps nest; messages have the outermost
// one.
class CudaStep {
 public:
  CudaStep(int ordinal, const char* doing, int64_t tokens = 0);
  ~CudaStep();
  CudaStep(const CudaStep&) = delete;
  CudaStep& operator=(const CudaStep&) = delete;

  // Records that the current device has answered. If it stops answering later, it was lost and not unreachable from the
  // start.
  static void note_device_works();

 private:
  int ordinal_;
  const char* doing_;
  int64_t tokens_;
};

}  // namespace dyno

#define DYNO_CUDA_CHECK(expression) ::dyno::cuda_check((expression), #expression, __FILE__, __LINE__)
#define DYNO_CUDA_CHECK_NOTHROW(expression) ::dyno::cuda_check_nothrow((expression), #expression, __FILE__, __LINE__)
// After every launch: `op` is the name of the family.
#define DYNO_LAUNCH_CHECK(op) ::dyno::cuda_check(cudaPeekAtLastError(), "launch of " op, __FILE__, __LINE__)
