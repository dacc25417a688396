// The simulation of virtual devices: transfers over a link take time, and a device can be lost.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace dyno::runtime {

class VirtualDevices {
 public:
  using Clock = std::chrono::steady_clock;

  explicit VirtualDevices(const plan::Plan& plan)
      : plan_(plan), states_(plan.devices.size()), copies_(plan.weights.size()) {}

  // The time at which a value that starts at `start` has arrived. A link carries one value at a time, so a value waits
  // until both links are free of other values. Copies of weights that have not arrived by then are delayed by the same
  // time. A GPU also lets other transfers pass a copy of many matrices.
  Clock::time_point arrival(plan::DeviceId from, plan::DeviceId to, size_t bytes, Clock::time_point start);
  // Starts a copy of a weight to the main device at `start`, after everything that the links carry.
  void copy(model::WeightId weight, plan::DeviceId from, size_t bytes, Clock::time_point start);
  Clock::time_point copy_arrival(model::WeightId weight) const { return copies_[static_cast<size_t>(weight)]; }
  void forget_copies();
  // The same from a device to host memory, starting now.
  Clock::time_point arrival_at_host(plan::DeviceId from, size_t bytes);
  // Returns no earlier than `when`. Sleeps and then spins, because a sleep takes longer than a short transfer.
  static void wait_until(Clock::time_point when);

  // The device is lost after it has run this many more segments.
  void lose(plan::DeviceId device, int64_t after_segments);
  // Called before each segment of the device. Throws DeviceLostError if it is lost.
  void enter(plan::DeviceId device);
  // Throws DeviceLostError if any device is lost.
  void check() const;

 private:
  static constexpr int64_t kNever = -1;
  struct State {
    Clock::time_point free{};        // the time at which its link has no more values
    int64_t segments_left = kNever;  // until the device is lost
    bool lost = false;
  };

  const plan::Link& link_of(plan::DeviceId id) const { return plan_.devices[static_cast<size_t>(id)].link; }
  Clock::duration transfer(plan::DeviceId from, plan::DeviceId to, size_t bytes) const;
  [[noreturn]] void fail(size_t device) const;

  const plan::Plan& plan_;
  std::vector<State> states_;
  std::vector<Clock::time_point> copies_;  // arrival times by weight
  Clock::time_point last_copy_{};
};

}  // namespace dyno::runtime
