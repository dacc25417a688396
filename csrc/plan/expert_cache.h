// Which experts of layers whose experts lie on the CPU also lie on the main device: the most used ones.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// By layer, the most used experts in the order of their places; empty where a layer has none or its experts lie
// elsewhere. They take at most ExpertCacheOptions::mib together. Of a cache that does not adapt, only those that the
// recorded text has chosen at all; of one that adapts on a GPU, only of layers whose experts a GPU reads as the types
// that they have on the CPU. Throws PlanError if the recorded use is not of this model, or if no layer's experts can
// adapt.
std::vector<std::vector<int32_t>> choose_cached(const Plan& plan, const model::ModelDesc& model);

// How often the recorded text chose each expert of a layer with a mixture; null if nothing is recorded.
const std::vector<int64_t>* recorded_uses(const Plan& plan, const model::ModelDesc& model, size_t layer);

// Why a cache that was asked for holds no expert, as a warning; empty if it holds one, or none was asked for.
std::string why_none_cached(const Plan& plan, const model::ModelDesc& model);

// The share of a layer's choices that the cached experts are expected to be, by their recorded use, or else evenly.
double cached_share(const Plan& plan, const model::ModelDesc& model, int32_t layer);

}  // namespace dyno::plan
