// Prints, for every error code of the CUDA runtime that has a name, which exception cuda_check() makes of it and
// whether the device counts as lost then. Needs no GPU.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "core/cuda/check.h"
#include "core/device_loss.h"
#include "core/error.h"

namespace {

const char* kind_of(cudaError_t status) {
  try {
    dyno::cuda_check(status, "call()", "file.cpp", 7);
  } catch (const dyno::DeviceLostError&) {
    return "DeviceLostError";
  } catch (const dyno::DeviceError&) {
    return "DeviceError";
  } catch (const dyno::OutOfMemoryError&) {
    return "OutOfMemoryError";
  }
  return "nothing";
}

}  // namespace

int main() {
  for (int code = 0; code < 1000; ++code) {
    const auto status = static_cast<cudaError_t>(code);
    const char* name = cudaGetErrorName(status);
    if (std::strncmp(name, "cuda", 4) != 0) continue;
    const int ordinal = 1000 + code;  // each code has a device of its own: the first loss of one stays
    const dyno::CudaStep step(ordinal, "decoding", 3);
    const char* kind = kind_of(status);
    std::printf("%s %s %s\n", name, kind, dyno::device_loss(ordinal).empty() ? "kept" : "lost");
  }
  {
    const dyno::CudaStep step(7, "decoding", 3);
    kind_of(cudaErrorIllegalAddress);
    kind_of(cudaErrorLaunchFailure);
    const dyno::CudaStep closing(7, "closing a session");
    // The first is what an error looks like on a device that was lost and reported; the second is none of that.
    dyno::cuda_check_nothrow(cudaErrorIllegalAddress, "cudaFree(lost)", "file.cpp", 8);
    dyno::cuda_check_nothrow(cudaErrorInvalidValue, "cudaFree(wrong)", "file.cpp", 9);
  }
  std::printf("message %s\n", dyno::device_loss(7).c_str());
  try {
    dyno::check_not_lost(7);
    std::printf("again nothing\n");
  } catch (const dyno::DeviceLostError& error) {
    std::printf("again %s\n", error.what());
  }
  dyno::check_not_lost(8);  // the others are not concerned
  return 0;
}
