// Where weights lie, from a dict of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "plan/cost.h"
#include "plan/plan.h"

namespace dyno {

// `placement`: by the load settings; the dict says what differs, and which devices there are. Throws ProfileError for
// unknown names and values of another type. The plan checks what they mean.
plan::PlacementOptions read_placement(const nanobind::dict& dict, plan::PlacementOptions placement);

// Of its key expert_uses: ExpertCacheOptions::uses. Throws PlanError for a use below 0.
std::vector<std::vector<int64_t>> read_expert_uses(const nanobind::dict& dict);

// Rates by the name of a device: memory_gbps, weights_gbps, core_gbps, gflops_one, gflops_many, launch_us, spread_us,
// experts_us, link_gbps, latency_us.
std::vector<plan::NamedRates> read_rates(const nanobind::dict& dict);
nanobind::dict cost_dict(const plan::Plan& plan, const plan::PlanCost& cost);

}  // namespace dyno
