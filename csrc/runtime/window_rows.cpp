#include "runtime/window_rows.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace dyno::runtime {

// Query q sees key k if q - k < window, and the next token is query `position`.
Rows WindowRows::needed(int64_t position, int64_t slack) const {
  return {std::max<int64_t>(0, position - window_ + 1 - slack), position};
}

int64_t WindowRows::last_held(int32_t slot, int64_t position) const {
  const std::vector<Rows>& lost = of(slot);
  int64_t held = std::max<int64_t>(0, position);
  // From the last lost range to the first: if a range cuts the window, the sequence goes back to the start of the
  // range.
  for (auto rows = lost.rbegin(); rows != lost.rend(); ++rows) {
    const Rows window = needed(held);
    if (window.begin == window.end) break;  // the next token reads only itself
    if (rows->begin < window.end && window.begin < rows->end) held = rows->begin;
  }
  return held;
}

int64_t WindowRows::first_kept(int32_t slot, int64_t position) const {
  int64_t first = needed(position, plan::kWindowSlack).begin;
  for (const Rows& rows : of(slot)) {
    if (rows.begin < position) first = std::max(first, std::min(rows.end, position));
  }
  return first;
}

std::vector<Rows> WindowRows::kept(int32_t slot, int64_t position) const {
  if (!active()) return {{0, position}};
  Rows last{first_kept(slot, position), position};
  std::vector<Rows> found;
  for (int64_t stop = stride_; stop > 0 && stop < position; stop += stride_) {
    const Rows window = needed(stop);
    if (window.begin == window.end || window.begin >= last.begin || last_held(slot, stop) != stop) continue;
    if (window.end < last.begin) {
      found.push_back(window);
    } else {
      last.begin = window.begin;
    }
  }
  found.push_back(last);
  return found;
}

std::vector<Rows> WindowRows::lose(int32_t slot, int64_t position, std::span<const Rows> kept) {
  const int64_t end = needed(position, plan::kWindowSlack).begin / plan::kWindowStep * plan::kWindowStep;
  Known known{.end = end, .kept = {}};
  std::copy_if(kept.begin(), kept.end(), std::back_inserter(known.kept),
               [&](const Rows& rows) { return rows.begin < end; });
  // True for most tokens, because `end` moves in steps.
  if (known == known_[static_cast<size_t>(slot)]) return {};
  std::vector<Rows> all = of(slot);
  std::vector<Rows> sorted = known.kept;
  for (int64_t stop = stride_; stop > 0 && needed(stop).begin < end; stop += stride_) sorted.push_back(needed(stop));
  std::sort(sorted.begin(), sorted.end(), [](const Rows& a, const Rows& b) { return a.begin < b.begin; });
  int64_t at = 0;
  for (const Rows& rows : sorted) {
    if (const int64_t stop = std::min(rows.begin, end); at < stop) all.push_back({at, stop});
    at = std::max(at, rows.end);
  }
  if (at < end) all.push_back({at, end});
  // Lost rows stay lost.
  std::sort(all.begin(), all.end(), [](const Rows& a, const Rows& b) { return a.begin < b.begin; });
  std::vector<Rows> merged;
  for (const Rows& rows : all) {
    if (!merged.empty() && rows.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, rows.end);
    } else {
      merged.push_back(rows);
    }
  }
  // Of rows that were lost earlier, a page that they share with newly lost rows still exists.
  std::vector<Rows> changed;
  std::set_difference(
      merged.begin(), merged.end(), of(slot).begin(), of(slot).end(), std::back_inserter(changed),
      [](const Rows& a, const Rows& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  of(slot) = std::move(merged);
  known_[static_cast<size_t>(slot)] = std::move(known);
  return changed;
}

void WindowRows::forget(int32_t slot, int64_t position) {
  std::vector<Rows>& lost = of(slot);
  std::erase_if(lost, [&](const Rows& rows) { return rows.begin >= position; });
  if (!lost.empty()) lost.back().end = std::min(lost.back().end, position);
  known_[static_cast<size_t>(slot)] = {};
}

void WindowRows::become_copy(int32_t slot, std::span<const Rows> kept) {
  of(slot).clear();
  known_[static_cast<size_t>(slot)] = {};
  int64_t at = 0;
  for (const Rows& rows : kept) {
    if (at < rows.begin) of(slot).push_back({at, rows.begin});
    at = rows.end;
  }
}

int64_t WindowRows::lost_rows(int32_t slot) const {
  int64_t count = 0;
  for (const Rows& rows : of(slot)) count += rows.end - rows.begin;
  return count;
}

}  // namespace dyno::runtime
