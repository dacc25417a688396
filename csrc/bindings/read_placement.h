// Reads the placement of weights from a Python dict.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "plan/cost.h"
#include "plan/plan.h"

namespace dyno {

// `placement`: the value from the load settings. The dict overrides it and lists the devices. Throws ProfileError for
// unknown names and wrong types; the plan checks the values.
plan::PlacementOptions read_placement(const nanobind::dict& dict, plan::PlacementOptions placement);

// Reads the key expert_uses (ExpertCacheOptions::uses). Throws PlanError for a negative count.
std::vector<std::vector<int64_t>> read_expert_uses(const nanobind::dict& dict);

// Rates by device name: memory_gbps, weights_gbps, core_gbps, gflops_one, gflops_many, launch_us, spread_us,
// experts_us, link_gbps, latency_us.
std::vector<plan::NamedRates> read_rates(const nanobind::dict& dict);
nanobind::dict cost_dict(const plan::Plan& plan, const plan::PlanCost& cost);

}  // namespace dyno
