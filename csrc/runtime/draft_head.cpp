#include "runtime/draft_head.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "runtime/session.h"

namespace dyno::runtime {

DraftHead::DraftHead(std::unique_ptr<Session> head, int64_t n_embd, size_t slots)
    : head_(std::move(head)), n_embd_(n_embd), sequences_(slots) {}

DraftHead::~DraftHead() = default;

void DraftHead::note(const ops::SequenceRun& run, std::span<const int32_t> tokens, const float* rows) {
  Sequence& s = sequences_[static_cast<size_t>(run.slot)];
  // A sequence that began before the head was loaded is not known until it begins anew.
  if (static_cast<size_t>(run.position) != s.tokens.size()) return;
  s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  s.rows.insert(s.rows.end(), rows, rows + static_cast<int64_t>(tokens.size()) * n_embd_);
}

void DraftHead::forget(int32_t slot, int64_t positions) {
  Sequence& s = sequences_[static_cast<size_t>(slot)];
  const auto kept = std::min(s.tokens.size(), static_cast<size_t>(positions));
  s.tokens.resize(kept);
  s.rows.resize(kept * static_cast<size_t>(n_embd_));
  s.given.resize(std::min(s.given.size(), kept));
}

void DraftHead::copy(int32_t from, int32_t to, int64_t positions) {
  Sequence& target = sequences_[static_cast<size_t>(to)];
  target = sequences_[static_cast<size_t>(from)];
  target.given.clear();  // the head's own cache is not copied
  forget(to, positions);
}

void DraftHead::draft(int32_t slot, int64_t positions, int32_t token, float* logits) {
  Sequence& s = sequences_[static_cast<size_t>(slot)];
  DYNO_CHECK(PlanError, positions > 0, "[draft] sequence ", slot,
             " is empty; decode at least one token before a draft");
  DYNO_CHECK(PlanError, s.tokens.size() == static_cast<size_t>(positions), "[draft] the head knows ", s.tokens.size(),
             " of the ", positions, " tokens of sequence ", slot,
             "; load it before the sequence begins, or reset the sequence and decode it again");
  std::vector<int32_t> follow(s.tokens.begin() + 1, s.tokens.end());
  follow.push_back(token);
  // Pairs that the head has, with the tokens that came to follow; the last pair's logits are wanted.
  const auto differ = std::mismatch(s.given.begin(), s.given.end(), follow.begin(), follow.end());
  const auto begin = std::min(static_cast<size_t>(differ.first - s.given.begin()), follow.size() - 1);
  head_->rewind(slot, static_cast<int64_t>(begin));
  s.given.resize(begin);
  DecodeRequest request;
  request.sequences.push_back({.slot = slot, .tokens = std::span(follow).subspan(begin)});
  request.rows_in = s.rows.data() + begin * static_cast<size_t>(n_embd_);
  request.logits = logits;
  head_->decode(request);
  s.given = std::move(follow);
}

}  // namespace dyno::runtime
