// Placement by itself: where a plan does not fit its main device, the fastest of those that fit.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/cost.h"
#include "plan/plan.h"

namespace dyno::plan {

// The work by which a placement is judged: a prompt, and an answer generated after it.
struct Workload {
  int64_t prompt = 512;
  int64_t generated = 128;
};
// Seconds of it.
double workload_seconds(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates,
                        const Workload& workload);

// The bytes that the plan takes of its main device, with `scratch` and what the runtime itself needs on a GPU.
size_t main_device_bytes(const Plan& plan, size_t scratch);

// Whether the CPU has room for its part within the limit that the placement gives it.
bool host_fits(const Plan& plan);

// The plan as it is where its main device has `free` bytes for it, else the one that is expected to be fastest among
// those that do and that leave layers, or experts of layers, to the CPU. If the placement may choose a cache, the
// memory that is left may hold experts of the CPU as well. Its options name what was chosen, so that the same plan can
// be made again; its `placement_note` says what, and what one more layer on the device would take. Throws
// OutOfMemoryError if even no layer fits. `cached`: of the free bytes, for experts of the CPU that also lie there.
Plan place_automatically(Plan whole, const model::ModelDesc& model, const std::vector<NamedRates>& rates, size_t free,
                         size_t scratch, size_t cached = 0);

// Rates for each device of a plan: by name, else those of `cpu` for a virtual device, else assumed ones.
std::vector<DeviceRates> rates_for(const Plan& plan, const std::vector<NamedRates>& named);

}  // namespace dyno::plan
