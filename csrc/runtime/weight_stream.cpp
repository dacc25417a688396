#include "runtime/weight_stream.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "core/error.h"
#include "plan/expert_share.h"

namespace dyno::runtime {
namespace {

// With this many choices for each expert, almost every expert is used. So a layer without a prediction is copied
// completely.
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

std::vector<int64_t> WeightStream::routed(const plan::Fetch& fetch, int64_t tokens) {
  std::vector<int32_t> ids(static_cast<size_t>(tokens * fetch.used));
  main_.read(fetch.ids, 0, std::as_writable_bytes(std::span(ids)));
  std::vector<int64_t> rows(static_cast<size_t>(fetch.experts));
  for (const int32_t id : ids) {
    DYNO_CHECK(PlanError, id >= 0 && id < fetch.experts, "[moe] a token is routed to expert ", id, " of ",
               fetch.experts);
    ++rows[static_cast<size_t>(id)];
  }
  return rows;
}

const plan::Fetch* WeightStream::sharing(int32_t order) const {
  const auto found = std::find_if(fetches().begin(), fetches().end(),
                                  [&](const auto& f) { return f.order == order && f.shared_layer >= 0; });
  return found == fetches().end() ? nullptr : &*found;
}

int64_t WeightStream::taken(const plan::Fetch& fetch, int64_t tokens, int64_t chosen,
                            const std::vector<int64_t>& rows) const {
  const model::LayerSpec& layer = model_.layers[static_cast<size_t>(fetch.shared_layer)];
  return plan::experts_for_cpu(plan_, model_, *layer.mixture(), tokens, chosen, rows);
}

// For each expert of a layer: whether it is already being copied to the main device, or is in its cache.
std::vector<bool> WeightStream::there(int32_t order, size_t experts) const {
  std::vector<bool> all(experts, true);
  for (const plan::Fetch& fetch : fetches()) {
    if (fetch.order != order || fetch.ids == plan::kNoValue) continue;
    for (const model::WeightId id : fetch.weights) {
      if (matrices_of(fetch, id) != experts) continue;
      const plan::WeightPlacement& placed = plan_.weights[static_cast<size_t>(id)];
      const std::vector<bool>& present = present_[static_cast<size_t>(id)];
      for (size_t i = 0; i < experts; ++i) {
        const bool cached = placed.stream.cached != model::kNone && places_.of(placed.layer, i) >= 0;
        all[i] = all[i] && (cached || (i < present.size() && present[i]));
      }
    }
  }
  return all;
}

WeightStream::Experts WeightStream::share(const plan::Fetch& fetch, const std::vector<int64_t>& rows, int64_t tokens) {
  std::vector<size_t> chosen, open;  // those with the fewest rows first
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i] > 0) chosen.push_back(i);
  }
  std::stable_sort(chosen.begin(), chosen.end(), [&](size_t a, size_t b) { return rows[a] < rows[b]; });
  const std::vector<bool> ahead = there(fetch.order, rows.size());
  std::copy_if(chosen.begin(), chosen.end(), std::back_inserter(open), [&](size_t expert) { return !ahead[expert]; });
  const auto first_of = [&](const std::vector<size_t>& candidates) {
    std::vector<int64_t> counts;
    for (const size_t expert : candidates) counts.push_back(rows[expert]);
    return static_cast<size_t>(taken(fetch, tokens, static_cast<int64_t>(chosen.size()), counts));
  };
  Experts found{.wanted = std::vector<bool>(rows.size()), .expected = std::vector<bool>(rows.size())};
  for (const size_t expert : chosen) found.wanted[expert] = true;
  for (size_t i = first_of(chosen); i < chosen.size(); ++i) found.expected[chosen[i]] = true;
  std::vector<int32_t> places(rows.size());
  std::iota(places.begin(), places.end(), 0);
  const size_t most = first_of(open);
  for (size_t i = 0; i < most; ++i) {
    found.wanted[open[i]] = false;
    places[open[i]] = -1;
  }
  counts_.shared += static_cast<int64_t>(most);
  taken_[static_cast<size_t>(fetch.shared_layer)] = static_cast<int64_t>(most);
  main_.set_places(fetch.shared_layer, places);
  return found;
}

void WeightStream::bring(const plan::Fetch& fetch, model::WeightId id, const std::vector<bool>& wanted,
                         bool predicted) {
  const size_t count = matrices_of(fetch, id);
  const plan::WeightPlacement& placed = plan_.weights[static_cast<size_t>(id)];
  const model::WeightId own = count > 1 ? placed.stream.cached : model::kNone;
  const auto place = [&](size_t i) { return own == model::kNone ? int32_t{-1} : places_.of(placed.layer, i); };
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
    // Adjacent experts have adjacent places at load.
    const size_t first = i;
    const bool cached = place(first) >= 0;
    const auto follows = [&](size_t at) {
      return place(at) == (cached ? place(first) + static_cast<int32_t>(at - first) : -1);
    };
    while (i < count && missing(i) && follows(i)) present[i++] = true;
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

void WeightStream::bring_layer(int32_t order, const Experts* routed) {
  for (const plan::Fetch& fetch : fetches()) {
    if (fetch.order != order || (fetch.ids != plan::kNoValue) != (routed != nullptr)) continue;
    for (const model::WeightId id : fetch.weights) {
      if (routed != nullptr && matrices_of(fetch, id) > 1) {
        counts_.wanted += std::count(routed->wanted.begin(), routed->wanted.end(), true);
        last_[static_cast<size_t>(id)] = routed->expected;
      } else {
        ++counts_.wanted;
      }
      bring(fetch, id, routed != nullptr ? routed->wanted : std::vector<bool>{}, /*predicted=*/false);
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
        // Except as many as the CPU will take.
        const plan::Fetch* shared = sharing(order);
        const std::vector<int64_t> even(count, std::max<int64_t>(1, tokens * fetch.used / fetch.experts));
        const int64_t left = shared == nullptr ? 0 : taken(*shared, tokens, fetch.experts, even);
        std::vector<bool> most(count, true);
        std::fill(most.end() - static_cast<std::ptrdiff_t>(left), most.end(), false);
        bring(fetch, id, most, /*predicted=*/true);
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
    // The previous layer has been launched, and with it the last use of the half that the next layer's copies go to.
    main_.copies_follow_launches();
    take_half(fetch.order);
    bring_layer(fetch.order, nullptr);
  }
  const bool first_routed =
      fetch.ids != plan::kNoValue &&
      std::none_of(fetches().begin(), fetches().begin() + static_cast<std::ptrdiff_t>(index), chooses);
  if (first_routed) {
    const std::vector<int64_t> rows = routed(fetch, tokens);
    // A shared layer starts with its split node, which reads no weights.
    const bool shared = fetch.shared_layer >= 0;
    places_.note(shared ? fetch.shared_layer : plan_.weights[static_cast<size_t>(fetch.weights.front())].layer, rows);
    Experts experts;
    if (shared) {
      experts = share(fetch, rows, tokens);
    } else {
      for (const int64_t count : rows) experts.wanted.push_back(count > 0);
      experts.expected = experts.wanted;
    }
    bring_layer(fetch.order, &experts);
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
