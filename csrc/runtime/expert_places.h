// The experts of the CPU's layers that the main device has as well, as they are now: the plan says which these are at
// load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace dyno::runtime {

class ExpertPlaces {
 public:
  explicit ExpertPlaces(const plan::Plan& plan) : places_(plan.expert_places) {}

  // Of an expert of a layer with cached experts, among these; -1: it is not cached.
  int32_t of(int32_t layer, size_t expert) const { return places_[static_cast<size_t>(layer)][expert]; }

 private:
  std::vector<std::vector<int32_t>> places_;  // by layer and expert
};

}  // namespace dyno::runtime
