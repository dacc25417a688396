// Changes of settings that reduce the memory of a plan. Internal to plan/.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// A change of settings, and a lower bound of the bytes that it frees.
struct Remedy {
  std::string text;
  size_t frees = 0;
};

// The memory that is too small: of one device, or of all devices of the machine together.
struct Holder {
  std::optional<DeviceId> device;
  size_t kv_bytes = 0, state_bytes = 0, arena_bytes = 0;
  bool gpu = false;
};

// Whether weights of the main device can move to the CPU.
bool has_cpu_beside(const Plan& plan);

// All changes that free anything; a single one may not be enough. `weights_loaded`: only changes that do not move
// weights.
std::vector<Remedy> remedies(const Plan& plan, const Holder& holder, size_t missing, bool weights_loaded);

}  // namespace dyno::plan
