// Which rows of windowed layers sequences have lost, because no later token reads them.
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
  // `window`: of the layers that keep theirs alone, the longest; 0: no layer does, and nothing is ever lost.
  // `stride`: the window of each multiple of it stays; 0: none does.
  explicit WindowRows(int64_t window = 0, int64_t stride = 0, size_t sequences = 0)
      : window_(window), stride_(stride), lost_(sequences), known_(sequences) {}

  bool active() const { return window_ > 0; }
  // The rows that a sequence of `position` tokens needs for its next one, and `slack` before them.
  Rows needed(int64_t position, int64_t slack = 0) const;
  // The last position up to `position` whose window is there.
  int64_t last_held(int32_t slot, int64_t position) const;
  // The rows up to `position`, whose window is there, that a copy of the sequence takes: the ones of stops on the way,
  // and the last ones. Ascending and apart, and all of them if no layer keeps its window alone.
  std::vector<Rows> kept(int32_t slot, int64_t position) const;
  // Counts the rows far behind `position` as lost, but those in `kept` and of stops. The lost rows that stand together
  // with new ones.
  std::vector<Rows> lose(int32_t slot, int64_t position, std::span<const Rows> kept);
  // Rows from `position` on will be written anew.
  void forget(int32_t slot, int64_t position);
  // The rows between these and before them are lost and no others: the sequence has become a copy.
  void become_copy(int32_t slot, std::span<const Rows> kept);
  // Of one sequence.
  int64_t lost_rows(int32_t slot) const;

 private:
  // The first of the last rows, of those that stand together up to `position`.
  int64_t first_kept(int32_t slot, int64_t position) const;
  std::vector<Rows>& of(int32_t slot) { return lost_[static_cast<size_t>(slot)]; }
  const std::vector<Rows>& of(int32_t slot) const { return lost_[static_cast<size_t>(slot)]; }

  // The arguments of the last lose(): the rows from `end` on stay, and so do the rows in `kept`.
  struct Known {
    int64_t end = 0;
    std::vector<Rows> kept;
    friend bool operator==(const Known&, const Known&) = default;
  };

  int64_t window_ = 0, stride_ = 0;
  std::vector<std::vector<Rows>> lost_;  // by slot, ascending and apart
  std::vector<Known> known_;             // by slot
};

}  // namespace dyno::runtime
