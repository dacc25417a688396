// Mapped pages that the operating system cannot give: SIGBUS becomes a flag that somebody asks for afterwards.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace dyno {

// A range of mapped memory under watch, from construction to destruction. If a thread touches a page of it that cannot
// be read (the file was truncated, or its disk failed), zeros are mapped from there to the end of the range, the thread
// goes on, and lost() is true from then on. Whoever used the range asks lost() before it trusts what it computed.
//
// The handler of SIGBUS belongs to the whole process and is installed with the first watch. A fault that does not lie
// in a watched range goes to the handler that was there before. A system call that is handed a lost page fails with
// EFAULT and sets no flag.
class LostPages {
 public:
  // `range` begins at a page and stays mapped as long as this object lives.
  explicit LostPages(std::span<const std::byte> range);
  ~LostPages();
  LostPages(const LostPages&) = delete;
  LostPages& operator=(const LostPages&) = delete;

  bool lost() const { return watch_->lost.load(); }

  // One entry of the list that the handler walks. Entries are used again and never freed: a handler may read one at
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
