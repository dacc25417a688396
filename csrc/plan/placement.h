// The devices of a plan and the device of each weight, from the user's rules.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// The main device, then the other devices that a rule can name. Throws PlanError for a virtual device that does not
// exist, or whose link or memory is out of range.
std::vector<PlannedDevice> plan_devices(const DeviceInfo& main, const PlacementOptions& options);

// The device of each weight, parallel to ModelDesc::weights, from plan.load.placement. Rules take precedence, then
// cpu_moe and n_cpu_moe, then n_gpu_layers. Other weights are on the main device. Throws PlanError for a rule that is
// malformed, names no device of the plan or matches no tensor.
std::vector<DeviceId> weight_devices(const Plan& plan, const model::ModelDesc& model);

// The layer of a tensor "blk.<number>.…"; -1 if it belongs to no layer.
int64_t layer_of(std::string_view name);

}  // namespace dyno::plan
