// Automatic placement: if a plan does not fit its main device, finds the fastest plan that fits.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/cost.h"
#include "plan/plan.h"

namespace dyno::plan {

// The workload for which placements are compared: a prompt, and an answer generated after it.
struct Workload {
  int64_t prompt = 512;
  int64_t generated = 128;
};
// Expected seconds for the workload.
double workload_seconds(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates,
                        const Workload& workload);

// Bytes of the plan on its main device, with `scratch` and the reserve of the GPU runtime. Kept keys and values do not
// count, because the plan gives them up if memory is short.
size_t main_device_bytes(const Plan& plan, size_t scratch);

// Whether the CPU's part fits the memory limit of the placement.
bool host_fits(const Plan& plan);

// Returns `whole` if it fits `free` bytes on its main device. Otherwise returns the plan with the shortest expected
// time among those that fit and move layers, or experts of layers, to the CPU. If the placement may choose a cache, the
// remaining memory may hold experts of the CPU as well.
// The options of the result name the choice, so that the same plan can be built again. `placement_note` has the choice
// and the memory that one more layer on the device would need. Throws OutOfMemoryError if the plan does not fit even
// without any layer. `cached`: the part of the free bytes that is for cached experts.
Plan place_automatically(Plan whole, const model::ModelDesc& model, const std::vector<NamedRates>& rates, size_t free,
                         size_t scratch, size_t cached = 0);

// Rates for each device of a plan: by name; for a virtual device, else the rates of `cpu`; else assumed rates.
std::vector<DeviceRates> rates_for(const Plan& plan, const std::vector<NamedRates>& named);

}  // namespace dyno::plan
