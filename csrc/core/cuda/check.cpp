#include "core/cuda/check.h"

#include <cstdio>

#include "core/error.h"

namespace dyno {
namespace {

std::string message(cudaError_t status, const char* expression, const char* file, int line) {
  return str_cat("[cuda] ", expression, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status), " (", file,
                 ":", line, ")");
}

}  // namespace

void cuda_check(cudaError_t status, const char* expression, const char* file, int line) {
  if (status == cudaSuccess) [[likely]] {
    return;
  }
  (void)cudaGetLastError();
  if (status == cudaErrorMemoryAllocation) throw OutOfMemoryError(message(status, expression, file, line));
  throw DeviceError(message(status, expression, file, line));
}

void cuda_check_nothrow(cudaError_t status, const char* expression, const char* file, int line) noexcept {
  // At exit the driver may be gone before the last buffer is; there is nothing left to free then.
  if (status == cudaSuccess || status == cudaErrorCudartUnloading) return;
  (void)cudaGetLastError();
  std::fprintf(stderr, "[cuda] %s: %s: %s (%s:%d)\n", expression, cudaGetErrorName(status), cudaGetErrorString(status),
               file, line);
}

}  // namespace dyno
