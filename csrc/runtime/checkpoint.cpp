// Returning to earlier positions: to any position if all layers have keys and values, to checkpoints if some layers
// have recurrent state.
#include "runtime/checkpoint.h"

#include <algorithm>

#include "core/error.h"
#include "runtime/session.h"

namespace dyno::runtime {

void Session::move_back(int32_t slot, int64_t position) {
  positions_[static_cast<size_t>(slot)] = position;
  begun_[static_cast<size_t>(slot)] = std::min(begun_[static_cast<size_t>(slot)], position);
  windows_.forget(slot, position);
  std::erase_if(checkpoints_, [&](const std::weak_ptr<Checkpoint>& kept) {
    const std::shared_ptr<Checkpoint> c = kept.lock();
    if (c != nullptr && c->slot == slot && c->position > position) c->good = false;
    return c == nullptr || !c->good;
  });
  if (draft_head_ != nullptr) draft_head_->forget(slot, position);
}

// In this order, so that a sequence never counts positions whose memory is being freed.
void Session::go_back(int32_t slot, int64_t position) {
  const int64_t before = positions_[static_cast<size_t>(slot)];
  move_back(slot, position);
  give_back_forgotten(slot, before);
}

void Session::roll_back(const std::vector<int64_t>& before) {
  for (size_t i = 0; i < before.size(); ++i) roll_back(static_cast<int32_t>(i), before[i]);
}

void Session::roll_back(int32_t slot, int64_t before) {
  if (positions_[static_cast<size_t>(slot)] == before) return;
  const bool there = plan_.states.empty() && windows_.last_held(slot, before) == before;
  fall_back(slot, there ? before : 0);
}

void Session::fall_back(int32_t slot, int64_t position) {
  try {
    go_back(slot, position);
  } catch (const Error&) {
    // A lost device has nothing to free. The original error already goes to the caller.
  }
}

void Session::end_failed(std::span<const ops::SequenceRun> runs, bool started) {
  for (const ops::SequenceRun& run : runs) {
    if (started && !plan_.states.empty())
      fall_back(run.slot, 0);  // the state may have advanced by any number of
                               // tokens
  }
  try {
    for (const ops::SequenceRun& run : runs) {
      if (draft_head_ != nullptr) draft_head_->give_back_unused(run.slot);
      if (!windows_.active()) continue;
      executor_->give_back(run.slot, positions_[static_cast<size_t>(run.slot)], plan_.context.ctx,
                           CacheLayers::windowed);
    }
    if (windows_.active()) executor_->settle();
  } catch (const Error&) {
    // As in fall_back().
  }
}

void Session::reset() {
  check_idle();
  check_device();
  end_steps();
  for (int32_t slot = 0; slot < static_cast<int32_t>(positions_.size()); ++slot) {
    go_back(slot, 0);
  }
}

void Session::reset(int32_t slot) { rewind(slot, 0); }

void Session::rewind(int32_t slot, int64_t position) {
  check_idle();
  check_slot(slot);
  end_steps();
  int64_t& current = positions_[static_cast<size_t>(slot)];
  DYNO_CHECK(PlanError, position >= 0 && position <= current, "[session] cannot rewind sequence ", slot,
             " to position ", position, "; it holds ", current);
  if (position == current) return;
  if (position > 0 && !plan_.states.empty()) {
    for (const std::weak_ptr<Checkpoint>& kept : checkpoints_) {
      const std::shared_ptr<Checkpoint> c = kept.lock();
      if (c != nullptr && c->good && c->slot == slot && c->position == position) return restore(*c);
    }
    throw PlanError(str_cat(
        "[session] cannot rewind sequence ", slot, " to position ", position, ": ", model_.architecture,
        " has recurrent state, which can return only to 0 and to checkpoints; ", "the nearest earlier position is ",
        rewindable(slot, position), ". Take a checkpoint() where you will return to"));
  }
  check_window(slot, position, "rewind");
  go_back(slot, position);
}

int64_t Session::rewindable(int32_t slot, int64_t position) const {
  const int64_t current = this->position(slot);
  if (position >= current) return current;
  if (plan_.states.empty()) return windows_.last_held(slot, position);
  int64_t best = 0;
  for (const std::weak_ptr<Checkpoint>& kept : checkpoints_) {
    const std::shared_ptr<Checkpoint> c = kept.lock();
    if (c != nullptr && c->good && c->slot == slot && c->position <= position) best = std::max(best, c->position);
  }
  return best;
}

std::shared_ptr<const Checkpoint> Session::checkpoint(int32_t slot, bool spare) {
  check_ready();
  check_slot(slot);
  end_steps();
  auto made = std::make_shared<Checkpoint>();
  made->slot = slot;
  made->spare = spare;
  made->position = position(slot);
  // At position 0 a state counts as zeros, whatever its memory holds.
  if (made->position > 0) {
    made->state.resize(plan_.sequence_state_bytes());
    finish();
    if (!made->state.empty()) executor_->save_state(slot, made->state.data());
  }
  std::erase_if(checkpoints_, [](const std::weak_ptr<Checkpoint>& kept) { return kept.expired(); });
  checkpoints_.push_back(made);
  return made;
}

void Session::restore(const Checkpoint& checkpoint) {
  check_ready();
  const bool known = std::any_of(checkpoints_.begin(), checkpoints_.end(), [&](const std::weak_ptr<Checkpoint>& kept) {
    return kept.lock().get() == &checkpoint;
  });
  DYNO_CHECK(PlanError, known && checkpoint.good, "[session] the checkpoint of sequence ", checkpoint.slot,
             " at position ", checkpoint.position,
             " cannot be restored: the sequence has forgotten earlier tokens, newer checkpoints have taken ",
             "its window's place in the cache, or another session made it");
  check_slot(checkpoint.slot);
  end_steps();
  finish();
  try {
    if (!checkpoint.state.empty()) executor_->load_state(checkpoint.slot, checkpoint.state.data());
  } catch (...) {
    fall_back(checkpoint.slot, 0);  // the state may be partly overwritten
    throw;
  }
  go_back(checkpoint.slot, checkpoint.position);
}

}  // namespace dyno::runtime
