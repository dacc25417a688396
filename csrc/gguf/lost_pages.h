// Mapped pages that the operating system cannot provide: SIGBUS becomes a flag that users check afterwards.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dyno {

// A watched range of mapped memory. If a thread touches a page of it that cannot be read (the file was truncated, or
// its disk failed), zeros are mapped from there to the end of the range, the thread continues, and lost() is true from
// then on. Users of the range must check lost() before they trust their results.
//
// The SIGBUS handler is process-wide and installed with the first watch. A fault outside watched ranges goes to the
// previous handler. A system call that gets a lost page fails with EFAULT and does not set the flag.
class LostPages {
 public:
  // `range` starts at a page boundary and must stay mapped for the lifetime of this object.
  explicit LostPages(std::span<const std::byte> range);
  ~LostPages();
  LostPages(const LostPages&) = delete;
  LostPages& operator=(const LostPages&) = delete;

  bool lost() const { return watch_->lost.load(); }

  // An entry of the list that the handler walks. Entries are reused and never freed, because a handler may read one at
  // any time, in any thread.
  struct Watch {
    std::atomic<bool> taken{true};
    std::atomic<uintptr_t> begin{0};
    std::atomic<uintptr_t> end{0};
    std::atomic<bool> lost{false};
    Watch* next = nullptr;
  };

 private:
  Watch* watch_;
};

}  // namespace dyno
