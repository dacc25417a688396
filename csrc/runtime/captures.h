// Repeated work that can be captured as a graph: the schedule of attempts and their results.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace dyno::runtime {

// The second use is captured, because a single use is not worth a capture, and the first run loads modules that cannot
// be loaded during one. If a capture fails, uses continue launch by launch, and the next attempt comes after as many
// uses again. So a temporary failure costs little, and a permanent one almost nothing.
class CaptureAttempts {
 public:
  // Counts a use. Returns whether this use should be captured.
  bool due() { return ++uses_ == next_; }
  void succeeded() { reason_.clear(); }
  void failed(std::string reason) {
    ++failures_;
    next_ = 2 * uses_;
    reason_ = std::move(reason);
  }

  int64_t uses() const { return uses_; }
  int64_t failures() const { return failures_; }
  // The number of the next use that will be captured, if none was captured yet.
  int64_t next() const { return next_; }
  // The reason that the last attempt failed; empty if it succeeded.
  const std::string& reason() const { return reason_; }

 private:
  int64_t uses_ = 0, next_ = 2, failures_ = 0;
  std::string reason_;
};

// Captures of one kind of work since the last change of settings.
struct CaptureReport {
  bool draws = false;  // a step of generation; otherwise decoding
  int64_t tokens = 1, sequences = 1, rows = 1;
  int64_t depth = 0;  // upper bound of the sequences' positions
  bool captured = false;
  CaptureAttempts attempts{};
};

}  // namespace dyno::runtime
