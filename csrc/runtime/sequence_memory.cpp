// Copies of sequences, and their memory: it is mapped as sequences grow, and freed when they forget positions.
#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "core/error.h"
#include "runtime/checkpoint.h"
#include "runtime/session.h"

namespace dyno::runtime {

void Session::copy(int32_t from, int32_t to) { copy_prefix(from, to, position(from)); }

void Session::copy_prefix(int32_t from, int32_t to, int64_t positions) {
  check_ready();
  check_slot(from);
  check_slot(to);
  DYNO_CHECK(PlanError, positions >= 0 && positions <= position(from), "[session] cannot copy ", positions,
             " positions of sequence ", from, "; it holds ", position(from));
  check_window(from, positions, "copy");
  DYNO_CHECK(
      PlanError, rewindable(from, positions) == positions, "[session] cannot copy ", positions,
      " positions of sequence ", from, ": ", model_.architecture,
      " has recurrent state, which is known only at the end and at checkpoints; the nearest earlier position is ",
      rewindable(from, positions));
  if (from == to) {
    rewind(from, positions);
    return;
  }
  std::shared_ptr<const Checkpoint> past;
  for (const std::weak_ptr<Checkpoint>& kept : checkpoints_) {
    const std::shared_ptr<Checkpoint> c = kept.lock();
    if (c != nullptr && c->good && c->slot == from && c->position == positions) past = c;
  }
  end_steps();
  finish();
  std::vector<int64_t> ends(positions_.size(), 0);
  ends[static_cast<size_t>(to)] = positions;
  take_memory(ends);
  const std::vector<Rows> kept = windows_.kept(from, positions);
  move_back(to, 0);  // its checkpoints belong to its previous content
  if (windows_.active()) {
    executor_->give_back(to, 0, filled_[static_cast<size_t>(to)], CacheLayers::windowed);
    for (const Rows& rows : kept) executor_->take(to, rows.begin, rows.end, CacheLayers::windowed);
  }
  executor_->copy_sequence(from, to, positions, kept);
  if (positions < position(from) && past != nullptr && !past->state.empty()) {
    executor_->load_state(to, past->state.data());
  }
  positions_[static_cast<size_t>(to)] = begun_[static_cast<size_t>(to)] = positions;
  windows_.become_copy(to, kept);
  if (draft_head_ != nullptr) draft_head_->copy(from, to, positions);
}

void Session::trim(int32_t slot) {
  check_idle();
  check_slot(slot);
  const auto at = static_cast<size_t>(slot);
  if (filled_[at] <= positions_[at]) return;
  end_steps();
  finish();
  if (executor_ != nullptr) executor_->give_back(slot, positions_[at], filled_[at], CacheLayers::all);
  filled_[at] = positions_[at];
}

size_t Session::cache_bytes() const { return bytes_of_rows(/*all_devices=*/true); }

size_t Session::cache_memory() const { return bytes_of_rows(/*all_devices=*/false) + gpu_cache_bytes(); }

size_t Session::bytes_of_rows(bool all_devices) const {
  int64_t whole = 0, windowed = 0;
  for (const plan::KvLayer& kv : plan_.kv) {
    if (!all_devices && plan_.device(kv.device).kind != DeviceKind::cpu) continue;
    (kv.window > 0 ? windowed : whole) += kv.k_row_bytes + kv.v_row_bytes;
  }
  int64_t bytes = 0;
  for (size_t i = 0; i < filled_.size(); ++i) {
    const int64_t lost = windows_.lost_rows(static_cast<int32_t>(i));
    bytes += whole * filled_[i] + windowed * (positions_[i] - lost);
  }
  return static_cast<size_t>(bytes);
}

size_t Session::gpu_cache_bytes() const {
  size_t bytes = 0;
  for (size_t i = 0; executor_ != nullptr && i < plan_.devices.size(); ++i) {
    bytes += executor_->gpu_cache_bytes(static_cast<plan::DeviceId>(i));
  }
  return bytes;
}

int64_t Session::cached_positions() const { return std::accumulate(filled_.begin(), filled_.end(), int64_t{0}); }

void Session::take_memory(const std::vector<int64_t>& ends) {
  const auto taken = [&] {
    int64_t sum = 0;
    for (size_t i = 0; i < ends.size(); ++i) sum += std::max(filled_[i], ends[i]);
    return sum;
  };
  const int64_t most = plan_.context.cache_tokens;
  for (size_t i = 0; most > 0 && i < ends.size() && taken() > most; ++i) trim(static_cast<int32_t>(i));
  DYNO_CHECK(PlanError, most == 0 || taken() <= most, "[session] the sequences would hold ", taken(),
             " positions, but cache_tokens is ", most,
             "; reset or rewind sequences that are over, or open the model with ", "a larger cache_tokens");
  for (size_t i = 0; i < ends.size(); ++i) {
    if (ends[i] <= filled_[i]) continue;
    executor_->take(static_cast<int32_t>(i), filled_[i], ends[i], CacheLayers::whole);
    filled_[i] = ends[i];
  }
}

void Session::take_memory(int32_t slot, int64_t end) {
  std::vector<int64_t> ends(positions_.size(), 0);
  ends[static_cast<size_t>(slot)] = std::min(end, plan_.context.ctx);
  take_memory(ends);
}

void Session::take_windows(std::span<const ops::SequenceRun> runs) {
  if (!windows_.active()) return;
  for (const ops::SequenceRun& run : runs) {
    executor_->take(run.slot, run.position, run.position + run.n_tokens, CacheLayers::windowed);
  }
}

void Session::give_back_windows(int32_t slot) {
  if (!windows_.active()) return;
  drop_excess_checkpoints();
  const auto at = static_cast<size_t>(slot);
  std::vector<Rows> kept = {windows_.needed(begun_[at])};
  for (const std::weak_ptr<Checkpoint>& held : checkpoints_) {
    const std::shared_ptr<Checkpoint> c = held.lock();
    if (c == nullptr || !c->good || c->slot != slot) continue;
    kept.push_back(windows_.needed(c->position, plan::kWindowSlack));
  }
  for (const Rows& lost : windows_.lose(slot, positions_[at], kept)) {
    executor_->give_back(slot, lost.begin, lost.end, CacheLayers::windowed);
  }
}

// No later token would pass these rows, so their memory would stay allocated in addition to the windows of the next
// text.
void Session::give_back_forgotten(int32_t slot, int64_t before) {
  const int64_t position = positions_[static_cast<size_t>(slot)];
  if (!windows_.active() || executor_ == nullptr || before - position <= plan::kWindowSlack) return;
  // No later position is held, so a piece that the last row does not share with another sequence is freed too.
  executor_->give_back(slot, position, plan_.context.ctx, CacheLayers::windowed);
  executor_->settle();
}

// A checkpoint that its sequence could return to anyway costs nothing.
void Session::drop_excess_checkpoints() {
  int64_t left = plan_.window_checkpoints();
  for (const bool spare : {false, true}) {
    for (auto held = checkpoints_.rbegin(); held != checkpoints_.rend(); ++held) {
      const std::shared_ptr<Checkpoint> c = held->lock();
      if (c == nullptr || !c->good || c->position == 0 || c->spare != spare) continue;
      const bool near = c->position + plan::kWindowSlack >= positions_[static_cast<size_t>(c->slot)];
      if (!near && left-- <= 0) c->good = false;
    }
  }
}

void Session::check_window(int32_t slot, int64_t position, const char* doing) const {
  const int64_t held = windows_.last_held(slot, position);
  DYNO_CHECK(PlanError, held == position, "[session] cannot ", doing, " sequence ", slot, " at position ", position,
             ": layers with a window of ", plan_.cache_window(),
             " positions keep only their window, and the window there is gone; the nearest earlier position is ", held,
             ". Take a checkpoint() where you will return to, or open the model with window_cache=full");
}

}  // namespace dyno::runtime
