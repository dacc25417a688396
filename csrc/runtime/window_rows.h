// Tracks the rows of windowed layers that sequences have lost, because no later token reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"

namespace dyno::runtime {

// Positions [begin, end) of a sequence.
struct Rows {
  int64_t begin = 0, end = 0;
  friend bool operator==(const Rows&, const Rows&) = default;
};

class WindowRows {
 public:
  // `window`: the longest window of layers that keep only their window; 0: there is no such layer, and rows are never
  // lost. `stride`: the window at each multiple of it is kept; 0: none is.
  explicit WindowRows(int64_t window = 0, int64_t stride = 0, size_t sequences = 0)
      : window_(window), stride_(stride), lost_(sequences), known_(sequences) {}

  bool active() const { return window_ > 0; }
  // The rows that a sequence of `position` tokens needs for its next token, and `slack` rows before them.
  Rows needed(int64_t position, int64_t slack = 0) const;
  // The last position up to `position` whose window is complete.
  int64_t last_held(int32_t slot, int64_t position) const;
  // The rows that a copy of the sequence up to `position` gets; the window of `position` must be complete. These are
  // the windows of stops and the last rows, as disjoint ascending ranges. If no layer keeps only its window, these are
  // all rows.
  std::vector<Rows> kept(int32_t slot, int64_t position) const;
  // Marks the rows far behind `position` as lost, except rows in `kept` and the windows of stops. Returns the newly
  // lost rows, merged with adjacent lost rows.
  std::vector<Rows> lose(int32_t slot, int64_t position, std::span<const Rows> kept);
  // Rows from `position` on will be written again.
  void forget(int32_t slot, int64_t position);
  // The sequence has become a copy: of the rows before the last one in `kept`, exactly those outside `kept` are lost.
  void become_copy(int32_t slot, std::span<const Rows> kept);
  // Number of lost rows of a sequence.
  int64_t lost_rows(int32_t slot) const;

 private:
  // The first row of the contiguous range that ends at `position`.
  int64_t first_kept(int32_t slot, int64_t position) const;
  std::vector<Rows>& of(int32_t slot) { return lost_[static_cast<size_t>(slot)]; }
  const std::vector<Rows>& of(int32_t slot) const { return lost_[static_cast<size_t>(slot)]; }

  // The arguments of the last lose(): rows from `end` on and rows in `kept` were kept.
  struct Known {
    int64_t end = 0;
    std::vector<Rows> kept;
    friend bool operator==(const Known&, const Known&) = default;
  };

  int64_t window_ = 0, stride_ = 0;
  std::vector<std::vector<Rows>> lost_;  // by slot, disjoint and ascending
  std::vector<Known> known_;             // by slot
};

}  // namespace dyno::runtime
