// The division of a layer's experts in a prompt: the CPU multiplies by some of them while the others are copied to the
// main device.
#pragma once

#include <span>
#include <vector>

#include "plan/cost.h"
#include "plan/plan.h"

namespace dyno::plan {

// Whether the streamed list divides the experts of a layer in this way.
bool shares_experts(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f);

// How many candidates the CPU takes from the start of the list, of the `chosen` experts of a u-batch. `rows`: the rows
// of each candidate, ascending. The number follows the setting cpu_share, or makes CPU and link end at the same time,
// by the rates of the plan's devices.
int64_t experts_for_cpu(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f, int64_t tokens,
                        int64_t chosen, std::span<const int64_t> rows);
int64_t experts_for_cpu(const Plan& plan, const std::vector<DeviceRates>& rates, const model::ModelDesc& model,
                        const model::FfnSpec& f, int64_t tokens, int64_t chosen, std::span<const int64_t> rows);

// The CPU's share of a layer's experts, from 0 to 1, if tokens choose experts evenly.
double even_share(const Plan& plan, const std::vector<DeviceRates>& rates, const model::ModelDesc& model,
                  const model::FfnSpec& f, int64_t tokens);

}  // namespace dyno::plan
