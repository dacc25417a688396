// Which devices a plan has, and which of them each weight lies on: rules of the user, as values.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// The main device, then the others that a rule can name. Throws PlanError for a virtual device that does not
// exist, or whose link or memory cannot be.
std::vector<PlannedDevice> plan_devices(const DeviceInfo& main, const PlacementOptions& options);

// The device of each weight, parallel to ModelDesc::weights, by plan.load.placement. Rules come first, then cpu_moe and
// n_cpu_moe, then n_gpu_layers; a weight that none of them names lies on the main device. Throws PlanError for a rule
// that cannot be read, names no device of the plan or matches no tensor.
std::vector<DeviceId> weight_devices(const Plan& plan, const model::ModelDesc& model);

// The layer of a tensor "blk.<number>.…"; -1 where it belongs to none.
int64_t layer_of(std::string_view name);

}  // namespace dyno::plan
