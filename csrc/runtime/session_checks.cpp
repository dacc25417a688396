// Checks whether a session is usable and supports a request. Nothing here changes a session.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/device_loss.h"
#include "core/error.h"
#include "ops/sample/sample.h"
#include "runtime/generation.h"
#include "runtime/segment_executor.h"
#include "runtime/session.h"

namespace dyno::runtime {

// The host's record of a cache that is lost with its device must not look like an answer.
void Session::check_device() const {
  if (executor_ == nullptr) return;
  for (const plan::PlannedDevice& device : plan_.devices) {
    if (device.info.kind == DeviceKind::cuda) check_not_lost(device.info.ordinal);
  }
  executor_->check_devices();
}

void Session::check_ready() const {
  DYNO_CHECK(PlanError, executor_ != nullptr,
             "[session] this session has a plan but no weights (plan_only); open the engine without plan_only");
  check_idle();
  DYNO_CHECK(
      OutOfMemoryError, !failed_change_, "[session] a change of settings failed (", failed_change_.value_or(""),
      "), and the memory that it had released could not be allocated again; call set() again when memory is free");
}

// A signal handler runs between u-batches, whose positions it must not change, or during one, whose memory it must not
// use.
void Session::check_idle() const {
  DYNO_CHECK(PlanError, !computing_,
             "[session] a signal handler used this session during a call that computes; use it after that call has "
             "returned");
}

// Weights that were copied at load do not change with the file.
void Session::check_file() const {
  if (reads_file_) file_->check_unchanged();
}

void Session::check_slot(int32_t slot) const {
  check_device();
  DYNO_CHECK(PlanError, slot >= 0 && slot < plan_.context.sequences, "[session] sequence ", slot,
             " does not exist; the context has ", plan_.context.sequences, " sequences");
}

int64_t Session::position(int32_t slot) const {
  check_slot(slot);
  return positions_[static_cast<size_t>(slot)];
}

int64_t Session::token_count(const DecodeRequest& request) {
  int64_t n = 0;
  for (const SequenceInput& s : request.sequences) n += static_cast<int64_t>(s.tokens.size());
  return n;
}

int64_t Session::row_count(const DecodeRequest& request) {
  switch (request.rows) {
    case LogitRows::none:
      return 0;
    case LogitRows::last:
      return static_cast<int64_t>(request.sequences.size());
    case LogitRows::all: {
      int64_t n = 0;
      const int64_t every = std::max<int64_t>(request.every, 1);
      for (const SequenceInput& s : request.sequences) {
        n += (static_cast<int64_t>(s.tokens.size()) - 1) / every + 1 - s.first_row / every;
      }
      return n;
    }
  }
  return 0;
}

void Session::check(const DecodeRequest& request) const {
  DYNO_CHECK(PlanError, request.every >= 1, "[session] every is ", request.every, "; expected 1 or more");
  DYNO_CHECK(PlanError, !request.sequences.empty(),
             "[session] there is nothing to decode, because no sequences were given");
  std::vector<bool> seen(positions_.size(), false);
  for (const SequenceInput& s : request.sequences) {
    check_slot(s.slot);
    DYNO_CHECK(PlanError, !seen[static_cast<size_t>(s.slot)], "[session] sequence ", s.slot,
               " was given more than once");
    seen[static_cast<size_t>(s.slot)] = true;
    DYNO_CHECK(PlanError, !s.tokens.empty(), "[session] sequence ", s.slot, " has no tokens");
    DYNO_CHECK(PlanError, s.first_row >= 0 && s.first_row < static_cast<int64_t>(s.tokens.size()),
               "[session] the first row of sequence ", s.slot, " is ", s.first_row, "; it has ", s.tokens.size(),
               " tokens");
    check_room(s.slot, static_cast<int64_t>(s.tokens.size()));
    for (size_t i = 0; i < s.tokens.size(); ++i) check_token(s.tokens[i], static_cast<int64_t>(i), s.slot);
  }
  DYNO_CHECK(PlanError, request.hidden == nullptr || (request.logits == nullptr && request.row_draws.empty()),
             "[session] hidden rows cannot be combined with logits or draws in one decode");
  DYNO_CHECK(PlanError, request.likely == nullptr || (request.logits == nullptr && request.row_draws.empty()),
             "[session] the most probable tokens cannot be combined with logits or draws in one decode");
  const auto draws = static_cast<int64_t>(request.row_draws.size());
  DYNO_CHECK(PlanError, draws == 0 || draws == row_count(request), "[session] ", draws, " draws for ",
             row_count(request), " rows of logits");
  const auto tokens = static_cast<size_t>(token_count(request));
  for (const size_t rows : {request.rows_from.size(), request.rows_to.size()}) {
    DYNO_CHECK(PlanError, rows == 0 || rows == tokens, "[session] ", rows, " hidden rows for ", tokens, " tokens");
  }
  for (const RowDraw& draw : request.row_draws) {
    ops::check_settings(draw.settings);
    check_uniform(draw.uniform);
  }
}

void Session::check_room(int32_t slot, int64_t tokens) const {
  const int64_t end = position(slot) + tokens;
  if (end <= plan_.context.ctx) return;
  const std::string advice = end <= model_.n_ctx_train ? str_cat("open the model with ctx=", end, " or more")
                                                       : str_cat("no ctx is long enough: the model supports at most ",
                                                                 model_.n_ctx_train, " positions");
  throw PlanError(str_cat("[session] sequence ", slot, " would reach ", end, " positions, but the context holds ",
                          plan_.context.ctx, "; ", advice));
}

void Session::check_token(int32_t token, int64_t index, int32_t slot) const {
  DYNO_CHECK(PlanError, token >= 0 && token < model_.n_vocab, "[session] token ", token, " at index ", index,
             " of sequence ", slot, " does not exist; the vocabulary has ", model_.n_vocab, " tokens");
}

}  // namespace dyno::runtime
