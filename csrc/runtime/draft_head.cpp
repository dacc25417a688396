#include "runtime/draft_head.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "runtime/session.h"

namespace dyno::runtime {
DraftHead::DraftHead(std::unique_ptr<Session> head, int64_t n_embd, size_t slots)
    : head_(std::move(head)),
      n_embd_(n_embd),
      blocks_([session = head_.get()](size_t floats) { return session->rows_memory(floats); },
              kBlockRows * static_cast<size_t>(n_embd)),
      sequences_(slots) {}

DraftHead::~DraftHead() = default;

void DraftHead::give_back_unused(int32_t slot) {
  Sequence& s = sequences_[static_cast<size_t>(slot)];
  s.blocks.resize(std::min((s.tokens.size() + kBlockRows - 1) / kBlockRows, s.blocks.size()));
}

bool DraftHead::make_room(const ops::SequenceRun& run, std::span<float*> rows) {
  Sequence& s = sequences_[static_cast<size_t>(run.slot)];
  // A sequence that began before the head was loaded has no hidden rows until it begins again.
  const size_t begin = s.tokens.size(), end = begin + rows.size();
  if (static_cast<size_t>(run.position) != begin) return false;
  for (size_t i = begin / kBlockRows; i * kBlockRows < end; ++i) {
    if (i >= s.blocks.size()) {
      s.blocks.push_back(blocks_.take());
    } else if (s.blocks[i].use_count() > 1) {
      Block own = blocks_.take();
      const size_t kept = begin > i * kBlockRows ? begin - i * kBlockRows : 0;
      std::copy_n(s.blocks[i].get(), kept * static_cast<size_t>(n_embd_), own.get());
      s.blocks[i] = std::move(own);
    }
  }
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = row(s, begin + i);
  return true;
}

void DraftHead::note(const ops::SequenceRun& run, std::span<const int32_t> tokens) {
  Sequence& s = sequences_[static_cast<size_t>(run.slot)];
  if (static_cast<size_t>(run.position) == s.tokens.size())
    s.tokens.insert(s.tokens.end(), tokens.begin(), tokens.end());
  compare(s);
}

void DraftHead::forget(int32_t slot, int64_t positions) {
  Sequence& s = sequences_[static_cast<size_t>(slot)];
  const auto kept = std::min(s.tokens.size(), static_cast<size_t>(positions));
  s.tokens.resize(kept);
  give_back_unused(slot);
  s.given.resize(std::min(s.given.size(), kept));
  s.agreeing = std::min(s.agreeing, kept - std::min<size_t>(kept, 1));
  s.has_last = false;
  try {
    // The head's cache is rewound too, even for a sequence that is never drafted again.
    head_->rewind(slot, std::min(head_->position(slot), static_cast<int64_t>(s.given.size())));
  } catch (const DeviceLostError&) {
    // There is nothing to free, and the caller's next use of the device reports the loss.
  }
}

void DraftHead::copy(int32_t from, int32_t to, int64_t positions) {
  Sequence& target = sequences_[static_cast<size_t>(to)];
  Block last = std::move(target.last);
  target = sequences_[static_cast<size_t>(from)];
  target.last = std::move(last);
  target.given.clear();  // the head's cache is not copied
  target.agreeing = 0;
  forget(to, positions);
}

bool DraftHead::knows(int32_t slot, int64_t positions) const {
  return positions > 0 && sequences_[static_cast<size_t>(slot)].tokens.size() == static_cast<size_t>(positions);
}

void DraftHead::compare(Sequence& s) {
  size_t& n = s.agreeing;
  while (n < s.given.size() && n + 1 < s.tokens.size() && s.given[n] == s.tokens[n + 1]) ++n;
}

void DraftHead::give(Sequence& s, std::span<const int32_t> tokens) {
  s.given.insert(s.given.end(), tokens.begin(), tokens.end());
  compare(s);
}

int64_t DraftHead::lacks(int32_t slot) const {
  const Sequence& s = sequences_[static_cast<size_t>(slot)];
  return s.tokens.empty() ? 0 : static_cast<int64_t>(s.tokens.size() - 1 - s.agreeing);
}

void DraftHead::read(int32_t slot, int64_t count) {
  Sequence& s = sequences_[static_cast<size_t>(slot)];
  const size_t begin = s.agreeing;
  const auto n = static_cast<size_t>(std::clamp<int64_t>(count, 0, lacks(slot)));
  if (n == 0) return;
  head_->rewind(slot, static_cast<int64_t>(begin));
  s.given.resize(begin);
  const std::span<const int32_t> tokens = std::span<const int32_t>(s.tokens).subspan(begin + 1, n);
  std::vector<const float*> rows;
  for (size_t i = 0; i < n; ++i) rows.push_back(row(s, begin + i));
  head_->decode({.sequences = {{.slot = slot, .tokens = tokens}}, .rows = LogitRows::none, .rows_from = rows});
  head_->finish();  // the head may still read the rows
  give(s, tokens);
}

void DraftHead::draft(std::span<const Following> texts, const Drafts& out) {
  std::vector<std::vector<int32_t>> follow;  // for each text, from the first missing pair on
  std::vector<std::span<const int32_t>> tokens;
  std::vector<const float*> rows;
  for (const Following& text : texts) {
    DYNO_CHECK(PlanError, text.positions > 0, "[draft] sequence ", text.slot,
               " is empty; decode at least one token before a draft");
    DYNO_CHECK(PlanError, knows(text.slot, text.positions), "[draft] the head has read ",
               sequences_[static_cast<size_t>(text.slot)].tokens.size(), " of the ", text.positions,
               " tokens of sequence ", text.slot,
               "; load the head before the sequence begins, or reset the sequence and decode it again");
  }
  follow.reserve(texts.size());
  for (const Following& text : texts) {
    Sequence& s = sequences_[static_cast<size_t>(text.slot)];
    const size_t begin = s.agreeing;
    std::vector<int32_t>& lacking =
        follow.emplace_back(s.tokens.begin() + static_cast<int64_t>(begin) + 1, s.tokens.end());
    lacking.push_back(text.token);  // the logits of this pair are wanted, even if the head already has it
    head_->rewind(text.slot, static_cast<int64_t>(begin));
    s.given.resize(begin);
    tokens.emplace_back(lacking);
    for (size_t t = begin; t < s.tokens.size(); ++t) rows.push_back(row(s, t));
  }
  feed(texts, tokens, rows, out);
  for (size_t i = 0; i < texts.size(); ++i) give(sequences_[static_cast<size_t>(texts[i].slot)], follow[i]);
}

void DraftHead::draft_further(std::span<const Following> texts, const Drafts& out) {
  std::vector<std::span<const int32_t>> tokens;
  std::vector<const float*> rows;
  for (const Following& text : texts) {
    const Sequence& s = sequences_[static_cast<size_t>(text.slot)];
    DYNO_CHECK(PlanError, knows(text.slot, text.positions) && s.given.size() == s.tokens.size() && s.has_last,
               "[draft] no token was drafted at the current position of sequence ", text.slot, "; draft one first");
    tokens.emplace_back(&text.token, 1);
    rows.push_back(s.last.get());
  }
  feed(texts, tokens, rows, out);
}

void DraftHead::feed(std::span<const Following> texts, std::span<const std::span<const int32_t>> tokens,
                     std::span<const float* const> rows, const Drafts& out) {
  std::vector<float*> own(rows.size(), nullptr);
  DecodeRequest request;
  for (size_t i = 0, end = 0; i < texts.size(); ++i) {
    Sequence& s = sequences_[static_cast<size_t>(texts[i].slot)];
    request.sequences.push_back({.slot = texts[i].slot, .tokens = tokens[i]});
    if (s.last == nullptr) s.last = head_->rows_memory(static_cast<size_t>(n_embd_));
    s.has_last = false;
    end += tokens[i].size();
    own[end - 1] = s.last.get();
  }
  request.rows_from = rows;
  request.rows_to = own;
  request.logits = out.logits;
  request.likely = out.likely;
  head_->decode(request);
  for (const Following& text : texts) sequences_[static_cast<size_t>(text.slot)].has_last = true;
}

// ---- of the session whose model the head belongs to ----

void Session::load_draft_head() {
  if (executor_ != nullptr) check_ready();
  end_steps();  // steps that run ahead do not store hidden rows
  draft_head_ = make_draft_head();
}

// For the sequences of plan_, which may not be the session's yet.
std::unique_ptr<DraftHead> Session::make_draft_head() const {
  const bool with_gpu = std::any_of(plan_.devices.begin(), plan_.devices.end(), [](const plan::PlannedDevice& device) {
    return device.info.kind == DeviceKind::cuda;
  });
  if (with_gpu && plan_.devices.size() > 1) {
    std::string devices;
    for (const plan::PlannedDevice& device : plan_.devices) {
      devices += str_cat(devices.empty() ? "" : ", ", device_name(device.info));
    }
    throw UnsupportedError(str_cat("[draft] the head that drafts tokens needs the whole model on one GPU or on the ",
                                   "CPU, but this model is on ", devices,
                                   "; open it with device=cpu, or entirely on one GPU (without placement, ",
                                   "cpu_moe, n_cpu_moe, n_gpu_layers and split)"));
  }
  plan::LoadOptions load = plan_.load;
  load.placement = {};
  load.layers = {};
  load.expert_cache = {};
  load.numa = plan::NumaMode::off;
  plan::ContextOptions context = plan_.context;
  // It holds the same positions as the model, and a draft of each sequence.
  if (context.cache_tokens > 0) context.cache_tokens += context.sequences * kMostDraft;
  context.window_cache = plan::WindowCache::full;
  DeviceInfo device = plan_.main_device();
  if (device.kind == DeviceKind::cpu) device.ordinal = 0;  // a virtual device belongs to the model's plan alone
  load.cpu_repack = false;  // embedding and output are pages of the file, shared with the model without a second copy
  auto head = std::make_unique<Session>(file_, load, context, settings_, device, std::vector<profile::KernelEntry>(),
                                        executor_ != nullptr ? Loading::weights : Loading::plan_only,
                                        model::Part::draft_head, this);
  return std::make_unique<DraftHead>(std::move(head), model_.n_embd, static_cast<size_t>(context.sequences));
}

bool Session::can_draft(int32_t slot) const {
  return draft_head_ != nullptr && draft_head_->knows(slot, position(slot));
}

int64_t Session::draft_lacks(int32_t slot) const { return can_draft(slot) ? draft_head_->lacks(slot) : 0; }

void Session::read_for_draft(int32_t slot, int64_t tokens) {
  check_idle();
  if (can_draft(slot)) draft_head_->read(slot, tokens);
}

void Session::draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, float* logits) {
  draft(texts, further, Drafts{.logits = logits});
}

void Session::draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, Likely* likely) {
  draft(texts, further, Drafts{.likely = likely});
}

void Session::draft(std::span<const std::pair<int32_t, int32_t>> texts, bool further, const Drafts& out) {
  check_ready();
  DYNO_CHECK(PlanError, draft_head_ != nullptr, "[draft] no head is loaded; call load_draft_head() first");
  std::vector<Following> following;
  for (const auto& [slot, token] : texts) {
    check_slot(slot);
    check_token(token, 0, slot);
    following.push_back({.slot = slot, .token = token, .positions = position(slot)});
  }
  if (further) {
    draft_head_->draft_further(following, out);
  } else {
    draft_head_->draft(following, out);
  }
}

// ---- of the head's own session ----

std::vector<model::WeightId> Session::borrow(plan::Plan& plan) const {
  if (lender_ == nullptr) return {};
  return plan::borrow_weights(plan, model_, lender_->plan_, lender_->model_);
}

std::vector<const std::byte*> Session::lent_weights() {
  std::vector<const std::byte*> lent;
  for (const model::WeightId id : borrow(plan_)) {
    lent.push_back(id == model::kNone ? nullptr : lender_->executor_->lendable(id));
  }
  return lent;
}

size_t Session::promised_bytes(int ordinal) const {
  if (executor_ == nullptr || !plan_.cache_by_need()) return 0;
  size_t promised = 0;
  for (size_t i = 0; i < plan_.devices.size(); ++i) {
    const plan::PlannedDevice& device = plan_.devices[i];
    if (device.info.kind != DeviceKind::cuda || device.info.ordinal != ordinal) continue;
    const size_t taken = executor_->gpu_cache_bytes(static_cast<plan::DeviceId>(i));
    promised += device.kv_bytes - std::min(device.kv_bytes, taken);
  }
  return promised;
}

}  // namespace dyno::runtime
