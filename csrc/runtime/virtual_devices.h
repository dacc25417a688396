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

  explicit VirtualDevices(const plan::Plan& plan) : plan_(plan), states_(plan.devices.size()) {}

  // When bytes that set out at `start`, from one device to another, have arrived. A link carries one transfer at a
  // time: they set out when both links are free, and the links are taken until then.
  Clock::time_point arrival(plan::DeviceId from, plan::DeviceId to, size_t bytes, Clock::time_point start);
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
    Clock::time_point free{};        // of its link
    int64_t segments_left = kNever;  // until it is lost
    bool lost = false;
  };

  const plan::Link& link_of(plan::DeviceId id) const { return plan_.devices[static_cast<size_t>(id)].link; }
  [[noreturn]] void fail(size_t device) const;

  const plan::Plan& plan_;
  std::vector<State> states_;
};

}  // namespace dyno::runtime
