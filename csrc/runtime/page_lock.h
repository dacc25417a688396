// Page-locked host memory: copies to and from a GPU are asynchronous and need no intermediate buffer of the driver.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace dyno::runtime {

// Locks a range of this process's memory for all GPUs. If the system refuses, problem() has the reason and a remedy,
// and copies still work, but slower.
class PageLock {
 public:
  PageLock() = default;
  // `ordinal`: the GPU whose context is used. An empty range needs no lock. Does nothing in a build without CUDA.
  PageLock(std::span<std::byte> memory, int ordinal, const char* purpose);
  ~PageLock();
  PageLock(PageLock&& other) noexcept;
  PageLock& operator=(PageLock&& other) noexcept;
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

  // Empty if the memory is locked or does not need a lock.
  const std::string& problem() const { return problem_; }

 private:
  std::byte* locked_ = nullptr;
  std::string problem_;
};

}  // namespace dyno::runtime
