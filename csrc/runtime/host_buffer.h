// Anonymous host memory, page-aligned and zeroed; pages become resident when first touched.
#pragma once

#include <cstddef>

namespace dyno::runtime {

class HostBuffer {
 public:
  HostBuffer() = default;
  // Throws OutOfMemoryError with the size. Asks for huge pages, which matter for weights that are streamed.
  explicit HostBuffer(size_t bytes, const char* purpose);
  ~HostBuffer();
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace dyno::runtime
