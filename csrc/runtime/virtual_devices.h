// The behaviour of virtual devices: a link takes time, and a device can be lost.
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

  // When bytes of values that set out at `start`, from one device to another, have arrived. A link carries one value at
  // a time: they set out when both links are free of values, and copies of weights that have not arrived by then are
  // late by as much. A GPU's copies of many matrices likewise let other transfers pass.
  Clock::time_point arrival(plan::DeviceId from, plan::DeviceId to, size_t bytes, Clock::time_point start);
  // A copy of a weight to the main device sets out at `start`, behind all that the links carry.
  void copy(model::WeightId weight, plan::DeviceId from, size_t bytes, Clock::time_point start);
  Clock::time_point copy_arrival(model::WeightId weight) const { return copies_[static_cast<size_t>(weight)]; }
  void forget_copies();
  // Likewise from a device to the memory of the machine, from now on.
  Clock::time_point arrival_at_host(plan::DeviceId from, size_t bytes);
  // Returns no earlier. Sleeps, and spins at the end, because a sleep is longer than a short transfer.
  static void wait_until(Clock::time_point when);

  // The device is lost after it has run so many more segments.
  void lose(plan::DeviceId device, int64_t after_segments);
  // Before a segment of the device. Throws DeviceLostError if it is lost.
  void enter(plan::DeviceId device);
  // Throws DeviceLostError if any device is lost.
  void check() const;

 private:
  static constexpr int64_t kNever = -1;
  struct State {
    Clock::time_point free{};        // of its link, of values
    int64_t segments_left = kNever;  // until it is lost
    bool lost = false;
  };

  const plan::Link& link_of(plan::DeviceId id) const { return plan_.devices[static_cast<size_t>(id)].link; }
  Clock::duration transfer(plan::DeviceId from, plan::DeviceId to, size_t bytes) const;
  [[noreturn]] void fail(size_t device) const;

  const plan::Plan& plan_;
  std::vector<State> states_;
  std::vector<Clock::time_point> copies_;  // arrivals, by weight
  Clock::time_point last_copy_{};
};

}  // namespace dyno::runtime
