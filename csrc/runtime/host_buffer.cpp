#include "runtime/host_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace dyno::runtime {

HostBuffer::HostBuffer(size_t bytes, const char* purpose) : size_(bytes) {
  if (bytes == 0) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  DYNO_CHECK(OutOfMemoryError, memory != MAP_FAILED, "[memory] cannot allocate ", bytes, " bytes for ", purpose, ": ",
             std::strerror(errno));
  data_ = static_cast<std::byte*>(memory);
  // Small buffers would only waste most of their huge page.
  constexpr size_t kHugePage = size_t{2} << 20;
  if (bytes >= 8 * kHugePage) madvise(data_, size_, MADV_HUGEPAGE);
}

HostBuffer::~HostBuffer() {
  if (data_ != nullptr) munmap(data_, size_);
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace dyno::runtime
