// Work that repeats and can be captured as a graph: when that is tried, and what became of it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace dyno::runtime {

// The second use is captured: work that comes once is not worth it, and the first run loads what cannot be loaded
// during a capture. Where that fails, uses go on launch by launch, and after as many again as there were it is tried
// again: a cause that passes costs little, one that stays next to nothing.
class CaptureAttempts {
 public:
  // Counts a use; whether it is one to capture.
  bool due() { return ++uses_ == next_; }
  void succeeded() { reason_.clear(); }
  void failed(std::string reason) {
    ++failures_;
    next_ = 2 * uses_;
    reason_ = std::move(reason);
  }

  int64_t uses() const { return uses_; }
  int64_t failures() const { return failures_; }
  // The use that will be captured next, where none was yet.
  int64_t next() const { return next_; }
  // Why the last attempt failed; empty after one that did not.
  const std::string& reason() const { return reason_; }

 private:
  int64_t uses_ = 0, next_ = 2, failures_ = 0;
  std::string reason_;
};

// Of one piece of work since settings were last changed.
struct CaptureReport {
  bool draws = false;  // a step of generation; else decoding
  int64_t tokens = 1, sequences = 1, rows = 1;
  bool captured = false;
  CaptureAttempts attempts{};
};

}  // namespace dyno::runtime
