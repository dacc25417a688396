#include "core/cuda/check.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

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

bool has_worked(int ordinal) {
  const auto at = static_cast<size_t>(ordinal);
  return at < works().size() && works()[at].load();
}

// Whether the context of a device still answers. A lost device returns its error from every call.
bool answers(int ordinal) {
  int previous = 0;
  const bool known = cudaGetDevice(&previous) == cudaSuccess;
  size_t free = 0, total = 0;
  const bool good = cudaSetDevice(ordinal) == cudaSuccess && cudaMemGetInfo(&free, &total) == cudaSuccess;
  if (known) (void)cudaSetDevice(previous);
  (void)cudaGetLastError();
  return good;
}

// The devices that this process has lost by a fatal error; the first one represents all. With the fault of one context,
// the driver ends every context of the process on any GPU and returns the same error from all of them. So the faulty
// device cannot be identified. If the current device answers, the error belongs to another one.
std::vector<int> devices_of_loss() {
  const int current = current_device();
  std::vector<int> silent;
  if (!answers(current)) silent.push_back(current);
  for (int other = 0; other < static_cast<int>(works().size()); ++other) {
    if (other != current && has_worked(other) && (!device_loss(other).empty() || !answers(other))) {
      silent.push_back(other);
    }
  }
  return silent.empty() ? std::vector<int>{current} : silent;
}

constexpr int kNoDevice = -1;

// Records all devices that are lost with this error and returns one of them; kNoDevice if none is lost.
int lose_device(cudaError_t status, std::string text) {
  Loss loss = loss_of(status);
  const int current = current_device();
  if (loss == Loss::unclear) loss = has_worked(current) && !answers(current) ? Loss::yes : Loss::no;
  if (loss != Loss::yes) return kNoDevice;
  const std::vector<int> lost = loss_of(status) == Loss::yes ? devices_of_loss() : std::vector<int>{current};
  if (lost.size() > 1) {
    std::string names;
    for (const int ordinal : lost) names += str_cat(names.empty() ? "" : ", ", "cuda:", ordinal);
    text += str_cat("; after a fault on one GPU, this process can use none of its GPUs: ", names);
  }
  for (const int ordinal : lost) mark_device_lost(ordinal, text);
  return lost.front();
}

}  // namespace

CudaStep::CudaStep(int ordinal, const char* doing, int64_t tokens)
    : ordinal_(current_step.ordinal), doing_(current_step.doing), tokens_(current_step.tokens) {
  current_step.ordinal = ordinal;
  if (*current_step.doing == '\0') {  // a step inside a larger one is reported as the larger one
    current_step.doing = doing;
    current_step.tokens = tokens;
  }
}
CudaStep::~CudaStep() { current_step = {ordinal_, doing_, tokens_}; }

void CudaStep::note_device_works() {
  const auto at = static_cast<size_t>(current_device());
  if (at < works().size()) works()[at].store(true, std::memory_order_relaxed);
}

// Errors after which the process must be relaunched according to the runtime's documentation, and hardware failures.
// Numbers where older toolkits do not have the name.
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
    case cudaErrorDevicesUnavailable:  // also returned if another process uses the GPU exclusively
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
  if (const int lost = lose_device(status, text); lost != kNoDevice) throw DeviceLostError(device_loss(lost));
  throw DeviceError(str_cat("[cuda] ", text));
}

void cuda_check_nothrow(cudaError_t status, const char* expression, const char* file, int line) noexcept {
  // At exit the driver may be unloaded before the last buffer is freed; there is nothing left to free then.
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
  try {
    // The memory of a lost device is gone with its context, and its user already got the error.
    if (loss_of(status) != Loss::no && !device_loss(current_device()).empty()) return;
    if (loss_of(status) == Loss::yes && any_device_lost()) {
      const std::vector<int> lost = devices_of_loss();
      if (std::none_of(lost.begin(), lost.end(), [](int d) { return device_loss(d).empty(); })) return;
    }
    const std::string text = message(status, expression, file, line);
    const int lost = lose_device(status, text);
    const std::string told = lost != kNoDevice ? device_loss(lost) : str_cat("[cuda] ", text);
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
