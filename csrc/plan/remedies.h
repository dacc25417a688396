// Changes of settings that make a plan smaller. Internal to plan/.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// A change of settings, and at least how many bytes it frees.
struct Remedy {
  std::string text;
  size_t frees = 0;
};

// The memory that is short: of one device, or of all devices of the machine together.
struct Holder {
  std::optional<DeviceId> device;
  size_t kv_bytes = 0, state_bytes = 0, arena_bytes = 0;
  bool gpu = false;
};

// Whether the CPU itself can take weights of the main device.
bool has_cpu_beside(const Plan& plan);

// Each that frees anything; by itself it need not be enough. `weights_loaded`: only what leaves the weights where they
// are.
std::vector<Remedy> remedies(const Plan& plan, const Holder& holder, size_t missing, bool weights_loaded);

}  // namespace dyno::plan
