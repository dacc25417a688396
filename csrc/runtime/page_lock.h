// Page-locked host memory: copies between it and a GPU are asynchronous and take no detour through the driver's own.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace dyno::runtime {

// Holds a piece of memory of this process in its place, for all GPUs. Where that is not allowed, problem() says why and
// what would allow it, and copies go on without, slower.
class PageLock {
 public:
  PageLock() = default;
  // For copies to and from the GPU `ordinal` and others. An empty piece needs no lock. In a build without CUDA there is
  // nothing to do.
  PageLock(std::span<std::byte> memory, int ordinal, const char* purpose);
  ~PageLock();
  PageLock(PageLock&& other) noexcept;
  PageLock& operator=(PageLock&& other) noexcept;
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

  // Empty where the memory is locked, or needs not be.
  const std::string& problem() const { return problem_; }

 private:
  std::byte* locked_ = nullptr;
  std::string problem_;
};

}  // namespace dyno::runtime
