#include "runtime/page_lock.h"

#include <utility>

#include "core/error.h"
#ifdef DYNO_HAVE_CUDA
#include <cuda_runtime.h>

#include "runtime/cuda/handles.h"
#endif

namespace dyno::runtime {

PageLock::PageLock([[maybe_unused]] std::span<std::byte> memory, [[maybe_unused]] int ordinal,
                   [[maybe_unused]] const char* purpose) {
#ifdef DYNO_HAVE_CUDA
  if (memory.empty()) return;
  const DeviceScope scope(ordinal, "page-locking memory");  // otherwise the driver would initialise another GPU
  const cudaError_t status =
      cudaHostRegister(memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (status == cudaSuccess) {
    locked_ = memory.data();
    return;
  }
  (void)cudaGetLastError();
  problem_ = str_cat(
      "[memory] ", memory.size() >> 20, " MiB for ", purpose, " cannot be page-locked (", cudaGetErrorString(status),
      "): copies between the CPU and the GPU go through another buffer and are slower. `ulimit -l`, or the memory "
      "limit of the container, may forbid it; raise it and open the model again");
#endif
}

PageLock::~PageLock() {
#ifdef DYNO_HAVE_CUDA
  // A lost device returns an error, but the memory is still valid.
  if (locked_ != nullptr && cudaHostUnregister(locked_) != cudaSuccess) (void)cudaGetLastError();
#endif
}

PageLock::PageLock(PageLock&& other) noexcept
    : locked_(std::exchange(other.locked_, nullptr)), problem_(std::move(other.problem_)) {}

PageLock& PageLock::operator=(PageLock&& other) noexcept {
  std::swap(locked_, other.locked_);
  std::swap(problem_, other.problem_);
  return *this;
}

}  // namespace dyno::runtime
