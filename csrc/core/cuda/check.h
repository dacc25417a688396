// Checks of CUDA calls. An error becomes an exception with the expression, the error's name and text, and file:line;
// the runtime's last-error state is cleared, so that a caught error does not show up in a later call. An error that
// leaves the device's context unusable is remembered (core/device_loss.h).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dyno {

// Throws OutOfMemoryError for cudaErrorMemoryAllocation, DeviceLostError for what ends the use of the device by this
// process, DeviceError for anything else that is no success.
void cuda_check(cudaError_t status, const char* expression, const char* file, int line);
// For destructors: writes the same message to stderr, but for what a device that is lost, and was reported so, answers.
void cuda_check_nothrow(cudaError_t status, const char* expression, const char* file, int line) noexcept;
// After a failure that another library reports in its own words: throws when the device itself does not answer.
void check_device_answers(const char* expression, const char* file, int line);

// Whether an error ends the use of its device by this process. `unclear`: the code can mean that, or a passing state.
enum class Loss : uint8_t { no, unclear, yes };
Loss loss_of(cudaError_t status);

// The device whose errors the calling thread meets and what it does there, for messages. Nests; the outermost tells
// what.
class CudaStep {
 public:
  CudaStep(int ordinal, const char* doing, int64_t tokens = 0);
  ~CudaStep();
  CudaStep(const CudaStep&) = delete;
  CudaStep& operator=(const CudaStep&) = delete;

  // The current device has answered: what stops answering later was lost, and not out of reach from the start.
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
