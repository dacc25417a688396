// Owners of CUDA streams, events, device memory and graphs: move-only, freed on destruction.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/cuda/check.h"
#include "ops/matmul/cuda/blas.h"

namespace dyno::runtime {

// Makes `ordinal` the calling thread's device for its lifetime. `doing` and `tokens` are for error messages. Throws
// DeviceLostError at once if this process has lost the device.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal, const char* doing = "", int64_t tokens = 0);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  CudaStep step_;
  int previous_ = 0;
};

// A handle of type T that is freed with `Destroy`.
template <typename T, void (*Destroy)(T) noexcept>
class Handle {
 public:
  Handle() = default;
  explicit Handle(T value) : value_(value) {}
  ~Handle() {
    if (value_ != nullptr) Destroy(value_);
  }
  Handle(Handle&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  T get() const { return value_; }
  explicit operator bool() const { return value_ != nullptr; }

 private:
  T value_ = nullptr;
};

void destroy_stream(cudaStream_t stream) noexcept;
void destroy_event(cudaEvent_t event) noexcept;
void destroy_graph(cudaGraph_t graph) noexcept;
void destroy_graph_exec(cudaGraphExec_t graph) noexcept;
using Stream = Handle<cudaStream_t, destroy_stream>;
using Event = Handle<cudaEvent_t, destroy_event>;
using Graph = Handle<cudaGraph_t, destroy_graph>;
using Blas = Handle<void*, ops::cuda::destroy_blas>;
using GraphExec = Handle<cudaGraphExec_t, destroy_graph_exec>;

Stream make_stream();  // does not wait for the default stream
Event make_event();    // without timing
Event make_timing_event();
// Whether all work before the event is complete.
bool is_over(const Event& event);

// Device memory of the current device. Throws OutOfMemoryError with the size and the purpose.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(size_t bytes, const char* purpose);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Page-locked host memory, which copies to and from the device need to be asynchronous.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(size_t bytes, const char* purpose);
  ~PinnedBuffer();
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// A small pool of page-locked memory for repeated requests. Returned pieces are kept for the next request.
class PinnedPool : public std::enable_shared_from_this<PinnedPool> {
 public:
  PinnedPool() { free_.reserve(kPieces); }  // so that returning a piece cannot fail
  // Returns at least `bytes`. The piece goes back to the pool with its last owner, and keeps the pool alive. Returns
  // null while kPieces are in use: a caller that keeps more does not need fast memory, and page-locked memory is
  // scarce.
  std::shared_ptr<std::byte[]> take(size_t bytes, const char* purpose);

 private:
  static constexpr size_t kPieces = 4;

  void give_back(PinnedBuffer buffer);

  std::mutex mutex_;
  std::vector<PinnedBuffer> free_;
  size_t out_ = 0;
};

}  // namespace dyno::runtime
