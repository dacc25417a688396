#include "runtime/cuda/handles.h"

#include <algorithm>
#include <string>

#include "core/cuda/check.h"
#include "core/device_loss.h"
#include "core/error.h"

namespace dyno::runtime {
namespace {

void check_memory(cudaError_t status, size_t bytes, const char* purpose, const char* kind) {
  if (status == cudaSuccess) return;
  const std::string what = str_cat("allocating ", kind, " memory for ", purpose);
  if (status != cudaErrorMemoryAllocation) cuda_check(status, what.c_str(), __FILE__, __LINE__);
  (void)cudaGetLastError();
  throw OutOfMemoryError(str_cat("[cuda] no ", kind, " memory for ", purpose, ": ", bytes, " bytes"));
}

}  // namespace

DeviceScope::DeviceScope(int ordinal, const char* doing, int64_t tokens) : step_(ordinal, doing, tokens) {
  check_not_lost(ordinal);
  DYNO_CUDA_CHECK(cudaGetDevice(&previous_));
  if (previous_ != ordinal) DYNO_CUDA_CHECK(cudaSetDevice(ordinal));
}
DeviceScope::~DeviceScope() { DYNO_CUDA_CHECK_NOTHROW(cudaSetDevice(previous_)); }

void destroy_stream(cudaStream_t stream) noexcept { DYNO_CUDA_CHECK_NOTHROW(cudaStreamDestroy(stream)); }
void destroy_event(cudaEvent_t event) noexcept { DYNO_CUDA_CHECK_NOTHROW(cudaEventDestroy(event)); }
void destroy_graph(cudaGraph_t graph) noexcept { DYNO_CUDA_CHECK_NOTHROW(cudaGraphDestroy(graph)); }
void destroy_graph_exec(cudaGraphExec_t graph) noexcept { DYNO_CUDA_CHECK_NOTHROW(cudaGraphExecDestroy(graph)); }

Stream make_stream() {
  cudaStream_t stream = nullptr;
  DYNO_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return Stream(stream);
}

Event make_event() {
  cudaEvent_t event = nullptr;
  DYNO_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return Event(event);
}

Event make_timing_event() {
  cudaEvent_t event = nullptr;
  DYNO_CUDA_CHECK(cudaEventCreate(&event));
  return Event(event);
}

bool is_over(const Event& event) {
  const cudaError_t status = cudaEventQuery(event.get());
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();  // otherwise the next launch would report it
    return false;
  }
  DYNO_CUDA_CHECK(status);
  return true;
}

DeviceBuffer::DeviceBuffer(size_t bytes, const char* purpose) : size_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  check_memory(cudaMalloc(&data, bytes), bytes, purpose, "device");
  CudaStep::note_device_works();
  data_ = static_cast<std::byte*>(data);
}
DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) DYNO_CUDA_CHECK_NOTHROW(cudaFree(data_));
}
DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PinnedBuffer::PinnedBuffer(size_t bytes, const char* purpose) : size_(bytes) {
  if (bytes == 0) return;
  void* data = nullptr;
  check_memory(cudaMallocHost(&data, bytes), bytes, purpose, "page-locked host");
  data_ = static_cast<std::byte*>(data);
}
PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) DYNO_CUDA_CHECK_NOTHROW(cudaFreeHost(data_));
}
PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

std::shared_ptr<std::byte[]> PinnedPool::take(size_t bytes, const char* purpose) {
  auto buffer = std::make_shared<PinnedBuffer>();
  {
    const std::lock_guard lock(mutex_);
    if (out_ == kPieces) return nullptr;
    const auto fits = std::find_if(free_.begin(), free_.end(), [&](const auto& b) { return b.size() >= bytes; });
    if (fits != free_.end()) {
      *buffer = std::move(*fits);
      free_.erase(fits);
    } else {
      free_.clear();  // too small for this request
      *buffer = PinnedBuffer(bytes, purpose);
    }
    ++out_;
  }
  std::byte* data = buffer->data();
  return {data, [buffer, pool = shared_from_this()](std::byte*) { pool->give_back(std::move(*buffer)); }};
}

void PinnedPool::give_back(PinnedBuffer buffer) {
  const std::lock_guard lock(mutex_);
  --out_;
  free_.push_back(std::move(buffer));
}

}  // namespace dyno::runtime
