#include "runtime/weight_stream.h"

#include <algorithm>

#include "core/error.h"

namespace dyno::runtime {
namespace {

// With so many choices for each expert, hardly one is left out: a layer that nothing is known of comes whole.
constexpr int64_t kChoicesForAll = 8;

}  // namespace

void WeightStream::forget() {
  present_.assign(plan_.weights.size(), {});
  last_.resize(plan_.weights.size());
  half_[0] = half_[1] = -1;
}

size_t WeightStream::matrices_of(const plan::Fetch& fetch, model::WeightId id) const {
  const int64_t batch = model_.weight(id).batch;
  return fetch.ids != plan::kNoValue && batch == fetch.experts ? static_cast<size_t>(batch) : 1;
}

// The old contents are overwritten from now on.
void WeightStream::take_half(int32_t order) {
  int32_t& held = half_[order % 2];
  if (held == order) return;
  for (const plan::Fetch& fetch : fetches()) {
    if (fetch.order % 2 != order % 2) continue;
    for (const model::WeightId id : fetch.weights) present_[static_cast<size_t>(id)].clear();
  }
  held = order;
}

std::vector<bool> WeightStream::routed(const plan::Fetch& fetch, int64_t tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(tokens * fetch.used));
  main_.read(fetch.ids, std::as_writable_bytes(std::span(ids)));
  std::vector<bool> wanted(static_cast<size_t>(fetch.experts));
  for (const int32_t id : ids) {
    DYNO_CHECK(PlanError, id >= 0 && id < fetch.experts, "[moe] a token is routed to expert ", id, " of ",
               fetch.experts);
    wanted[static_cast<size_t>(id)] = true;
  }
  return wanted;
}

void WeightStream::bring(const plan::Fetch& fetch, model::WeightId id, const std::vector<bool>& wanted,
                         bool predicted) {
  const size_t count = matrices_of(fetch, id);
  const plan::WeightPlacement& placed = plan_.weights[static_cast<size_t>(id)];
  const model::WeightId own = count > 1 ? placed.stream.cached : model::kNone;
  const auto place = [&](size_t i) {
    return own == model::kNone ? int32_t{-1} : plan_.expert_places[static_cast<size_t>(placed.layer)][i];
  };
  std::vector<bool>& present = present_[static_cast<size_t>(id)];
  present.resize(count);
  const auto missing = [&](size_t i) { return !present[i] && (count == 1 || wanted[i]); };
  std::vector<MatrixRange> ranges;
  std::vector<MatrixMove> moves;
  for (size_t i = 0; i < count;) {
    if (!missing(i)) {
      ++i;
      continue;
    }
    // Places of neighbours are neighbours.
    const size_t first = i;
    const bool cached = place(first) >= 0;
    while (i < count && missing(i) && (place(i) >= 0) == cached) present[i++] = true;
    const auto begin = static_cast<int64_t>(first), run = static_cast<int64_t>(i - first);
    if (cached) {
      moves.push_back({.from = place(first), .to = begin, .count = run});
    } else {
      ranges.push_back({.first = begin, .count = run});
    }
  }
  for (const MatrixMove& move : moves) counts_.cached += move.count;
  if (!moves.empty()) main_.bring_own(id, own, moves);
  if (ranges.empty()) return;
  const auto matrices = static_cast<int64_t>(count);
  const auto bytes = static_cast<int64_t>(placed.bytes) / matrices;
  for (const MatrixRange& range : ranges) {
    counts_.bytes += bytes * range.count;
    counts_.matrices += range.count;
    if (predicted) counts_.predicted += range.count;
  }
  main_.bring(id, cpu_.weight_memory(id), matrices, ranges);
}

void WeightStream::bring_layer(int32_t order, const std::vector<bool>* routed) {
  for (const plan::Fetch& fetch : fetches()) {
    if (fetch.order != order || (fetch.ids != plan::kNoValue) != (routed != nullptr)) continue;
    for (const model::WeightId id : fetch.weights) {
      if (routed != nullptr && matrices_of(fetch, id) > 1) {
        counts_.wanted += std::count(routed->begin(), routed->end(), true);
        last_[static_cast<size_t>(id)] = *routed;
      } else {
        ++counts_.wanted;
      }
      bring(fetch, id, routed != nullptr ? *routed : std::vector<bool>{}, /*predicted=*/false);
    }
  }
}

void WeightStream::predict_layer(int32_t order, int64_t tokens) {
  for (const plan::Fetch& fetch : fetches()) {
    if (fetch.order != order) continue;
    const bool all = tokens * fetch.used >= kChoicesForAll * fetch.experts;
    for (const model::WeightId id : fetch.weights) {
      const size_t count = matrices_of(fetch, id);
      const std::vector<bool>& last = last_[static_cast<size_t>(id)];
      if (count == 1 || last.size() == count) {
        bring(fetch, id, last, /*predicted=*/true);
      } else if (all) {
        bring(fetch, id, std::vector<bool>(count, true), /*predicted=*/true);
      }
    }
  }
}

void WeightStream::fetch(size_t index, int64_t tokens) {
  const plan::Fetch& fetch = fetches()[index];
  const bool first = index == 0 || fetches()[index - 1].order != fetch.order;
  const auto chooses = [&](const plan::Fetch& other) {
    return other.order == fetch.order && other.ids != plan::kNoValue;
  };
  if (first) {
    // The layer before is launched, and with it the last use of the half that the next layer's copies go to.
    main_.copies_follow_launches();
    take_half(fetch.order);
    bring_layer(fetch.order, nullptr);
  }
  const bool first_routed =
      fetch.ids != plan::kNoValue &&
      std::none_of(fetches().begin(), fetches().begin() + static_cast<std::ptrdiff_t>(index), chooses);
  if (first_routed) {
    const std::vector<bool> wanted = routed(fetch, tokens);
    bring_layer(fetch.order, &wanted);
  }
  const int32_t next = fetch.order + 1;
  const bool follows = std::any_of(fetches().begin(), fetches().end(), [&](const auto& f) { return f.order == next; });
  if (first && follows) {
    take_half(next);
    predict_layer(next, tokens);
  }
  for (const model::WeightId id : fetch.weights) main_.await_copies(id);
}

}  // namespace dyno::runtime
