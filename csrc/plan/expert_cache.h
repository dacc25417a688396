// Which experts of the CPU get a copy on the main device: the most used ones.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace dyno::plan {

// For each layer, the most used experts in the order of their places; empty if the layer has no experts or they are not
// on the CPU. Their total size is at most ExpertCacheOptions::mib. A static cache holds only experts that the recorded
// text chose. An adaptive cache on a GPU holds only experts of layers whose type on the GPU equals their type on the
// CPU. Throws PlanError if the counts were recorded with another model, or if no layer's experts can adapt.
std::vector<std::vector<int32_t>> choose_cached(const Plan& plan, const model::ModelDesc& model);

// How often the recorded text chose each expert of a layer with experts; null if nothing is recorded.
const std::vector<int64_t>* recorded_uses(const Plan& plan, const model::ModelDesc& model, size_t layer);

// The reason, as a warning, that a requested cache holds no expert; empty if it holds one, or none was requested.
std::string why_none_cached(const Plan& plan, const model::ModelDesc& model);

// The expected share of a layer's choices that are cached experts, from recorded counts, or else by equal use.
double cached_share(const Plan& plan, const model::ModelDesc& model, int32_t layer);

}  // namespace dyno::plan
