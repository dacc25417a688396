#include "runtime/virtual_devices.h"

#include <algorithm>
#include <thread>

#include "core/error.h"
#include "core/relax.h"

namespace dyno::runtime {

VirtualDevices::Clock::duration VirtualDevices::transfer(plan::DeviceId from, plan::DeviceId to, size_t bytes) const {
  const double seconds = plan::transfer_seconds(link_of(from), link_of(to), bytes);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

VirtualDevices::Clock::time_point VirtualDevices::arrival(plan::DeviceId from, plan::DeviceId to, size_t bytes,
                                                          Clock::time_point start) {
  if (from == to) return start;
  Clock::time_point begin = start;
  for (const plan::DeviceId id : {from, to}) begin = std::max(begin, states_[static_cast<size_t>(id)].free);
  const Clock::duration taken = transfer(from, to, bytes);
  for (const plan::DeviceId id : {from, to}) {
    if (link_of(id) != plan::Link{}) states_[static_cast<size_t>(id)].free = begin + taken;
  }
  if (from == plan::kMainDevice || to == plan::kMainDevice) {
    for (Clock::time_point& copy : copies_) {
      if (copy > begin) copy += taken;
    }
    if (last_copy_ > begin) last_copy_ += taken;
  }
  return begin + taken;
}

void VirtualDevices::copy(model::WeightId weight, plan::DeviceId from, size_t bytes, Clock::time_point start) {
  Clock::time_point begin = std::max(start, last_copy_);
  for (const plan::DeviceId id : {from, plan::kMainDevice})
    begin = std::max(begin, states_[static_cast<size_t>(id)].free);
  last_copy_ = begin + transfer(from, plan::kMainDevice, bytes);
  copies_[static_cast<size_t>(weight)] = last_copy_;
}

void VirtualDevices::forget_copies() {
  copies_.assign(plan_.weights.size(), {});
  last_copy_ = {};
}

VirtualDevices::Clock::time_point VirtualDevices::arrival_at_host(plan::DeviceId from, size_t bytes) {
  State& state = states_[static_cast<size_t>(from)];
  const double seconds = plan::transfer_seconds(link_of(from), {}, bytes);
  state.free = std::max(Clock::now(), state.free) +
               std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  return state.free;
}

void VirtualDevices::wait_until(Clock::time_point when) {
  constexpr std::chrono::microseconds kSpin(150);
  if (when - Clock::now() > 2 * kSpin) std::this_thread::sleep_until(when - kSpin);
  while (Clock::now() < when) relax();
}

void VirtualDevices::lose(plan::DeviceId device, int64_t after_segments) {
  const bool known = device >= 0 && static_cast<size_t>(device) < states_.size();
  const bool beside_gpu = plan_.main_device().kind == DeviceKind::cuda;
  DYNO_CHECK(PlanError,
             known && plan_.device(device).kind == DeviceKind::cpu && (plan_.device(device).ordinal > 0 || beside_gpu),
             "[device] only a virtual device of the plan, or the CPU beside a GPU, can be lost on purpose, not device ",
             "number ", device);
  DYNO_CHECK(PlanError, after_segments >= 0, "[device] after_segments is ", after_segments, "; expected 0 or more");
  State& state = states_[static_cast<size_t>(device)];
  state.segments_left = after_segments;
  state.lost = after_segments == 0;
}

void VirtualDevices::enter(plan::DeviceId device) {
  State& state = states_[static_cast<size_t>(device)];
  if (state.lost) fail(static_cast<size_t>(device));
  if (state.segments_left == kNever) return;
  if (state.segments_left == 0) {
    state.lost = true;
    fail(static_cast<size_t>(device));
  }
  --state.segments_left;
}

void VirtualDevices::check() const {
  for (size_t i = 0; i < states_.size(); ++i) {
    if (states_[i].lost) fail(i);
  }
}

void VirtualDevices::fail(size_t device) const {
  const DeviceInfo& info = plan_.devices[device].info;
  throw DeviceLostError(str_cat("[device] ", info.ordinal > 0 ? "virtual device " : "device ", device_name(info),
                                " is lost, with the weights and the cache that it held; open the engine again, "
                                "without it or with another placement"));
}

}  // namespace dyno::runtime
