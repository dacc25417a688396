// Prompts for which the CPU multiplies by a part of a layer's experts, while the others cross to the main device.
#pragma once

#include <span>
#include <vector>

#include "plan/cost.h"
#include "plan/plan.h"

namespace dyno::plan {

// Whether the streamed list shares the experts of a layer so.
bool shares_experts(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f);

// Of `chosen` experts that a u-batch of so many tokens is routed to, the CPU takes the first so many candidates.
// `rows`: of each candidate, ascending. By the setting cpu_share, or until the CPU and the link are expected to end
// together, by the rates of the plan's devices.
int64_t experts_for_cpu(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f, int64_t tokens,
                        int64_t chosen, std::span<const int64_t> rows);
int64_t experts_for_cpu(const Plan& plan, const std::vector<DeviceRates>& rates, const model::ModelDesc& model,
                        const model::FfnSpec& f, int64_t tokens, int64_t chosen, std::span<const int64_t> rows);

// The CPU's part of a layer's experts, between 0 and 1, if tokens choose evenly.
double even_share(const Plan& plan, const std::vector<DeviceRates>& rates, const model::ModelDesc& model,
                  const model::FfnSpec& f, int64_t tokens);

}  // namespace dyno::plan
