#include "core/cuda/check.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <exception>

#include "core/device_loss.h"
#include "core/error.h"

namespace dyno {
namespace {

struct Step {
  int ordinal = -1;
  const char* doing = "";
  int64_t tokens = 0;
};
thread_local Step current_step;

std::array<std::atomic<bool>, 64>& works() {
  static std::array<std::atomic<bool>, 64> all{};
  return all;
}

int current_device() {
  if (current_step.ordinal >= 0) return current_step.ordinal;
  int ordinal = 0;
  (void)cudaGetDevice(&ordinal);
  return ordinal;
}

std::string message(cudaError_t status, const char* expression, const char* file, int line) {
  std::string text =
      str_cat(expression, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status), " (", file, ":", line, ")");
  if (*current_step.doing != '\0') text += str_cat(", while ", current_step.doing);
  if (current_step.tokens > 0)
    text += str_cat(" ", current_step.tokens, current_step.tokens == 1 ? " token" : " tokens");
  return text;
}

// Whether the device is lost with this error; remembers it then.
bool lose_device(cudaError_t status, const std::string& text) {
  Loss loss = loss_of(status);
  const int ordinal = current_device();
  if (loss == Loss::unclear) {
    const auto at = static_cast<size_t>(ordinal);
    size_t free = 0, total = 0;
    const bool lost = at < works().size() && works()[at].load() && cudaMemGetInfo(&free, &total) != cudaSuccess;
    (void)cudaGetLastError();
    loss = lost ? Loss::yes : Loss::no;
  }
  if (loss == Loss::yes) mark_device_lost(ordinal, text);
  return loss == Loss::yes;
}

}  // namespace

CudaStep::CudaStep(int ordinal, const char* doing, int64_t tokens)
    : ordinal_(current_step.ordinal), doing_(current_step.doing), tokens_(current_step.tokens) {
  current_step.ordinal = ordinal;
  if (*current_step.doing == '\0') {  // what is done as part of something larger counts as that
    current_step.doing = doing;
    current_step.tokens = tokens;
  }
}
CudaStep::~CudaStep() { current_step = {ordinal_, doing_, tokens_}; }

void CudaStep::note_device_works() {
  const auto at = static_cast<size_t>(current_device());
  if (at < works().size()) works()[at].store(true, std::memory_order_relaxed);
}

// Those of which the runtime's documentation says that the process must be relaunched, and hardware that failed. By
// number where older toolkits lack the name.
Loss loss_of(cudaError_t status) {
  switch (static_cast<int>(status)) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case 226:  // cudaErrorContained
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case 721:  // cudaErrorTensorMemoryLeak
    case cudaErrorMpsClientTerminated:
    case 911:  // cudaErrorExternalDevice
      return Loss::yes;
    case cudaErrorDevicesUnavailable:  // also a GPU that another process has to itself
    case cudaErrorNoDevice:
    case cudaErrorDeviceUninitialized:
    case cudaErrorOperatingSystem:
    case cudaErrorContextIsDestroyed:
    case cudaErrorUnknown:
      return Loss::unclear;
    default:
      return Loss::no;
  }
}

void cuda_check(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  (void)cudaGetLastError();
  const std::string text = message(status, expression, file, line);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemoryError(str_cat("[cuda] ", text));
  if (lose_device(status, text)) throw DeviceLostError(device_loss(current_device()));
  throw DeviceError(str_cat("[cuda] ", text));
}

void cuda_check_nothrow(cudaError_t status, const char* expression, const char* file, int line) noexcept {
  // At exit the driver may be gone before the last buffer is; there is nothing left to free then.
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
  try {
    // The memory of a lost device is gone with its context, and whoever used it has been told.
    if (loss_of(status) != Loss::no && !device_loss(current_device()).empty()) return;
    const std::string text = message(status, expression, file, line);
    const std::string told = lose_device(status, text) ? device_loss(current_device()) : str_cat("[cuda] ", text);
    std::fprintf(stderr, "%s\n", told.c_str());
  } catch (const std::exception& error) {  // no memory for the text
    std::fprintf(stderr, "[cuda] %s: %s (%s)\n", expression, cudaGetErrorName(status), error.what());
  }
}

void check_device_answers(const char* expression, const char* file, int line) {
  size_t free = 0, total = 0;
  cuda_check(cudaMemGetInfo(&free, &total), expression, file, line);
}

}  // namespace dyno
