// The experts of the CPU's layers that the main device has as well, as they are now. The plan says which these are at
// load. If the cache adapts, an expert that is chosen more often takes the place of another one of its layer.
//
// That happens between two u-batches: the old expert is not cached from then on, a copy of the new one goes to its
// place beside the computation, and it counts as cached when the copy has arrived. So no launch reads a place that
// changes, and no memory is needed beyond the plan's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "runtime/backend.h"

namespace dyno::runtime {

class ExpertPlaces {
 public:
  // All arguments must outlive it. `main`: of the main device.
  ExpertPlaces(const plan::Plan& plan, const model::ModelDesc& model, Backend& cpu, Backend& main);

  // Of an expert of a layer with cached experts, among these; -1: it is not cached.
  int32_t of(int32_t layer, size_t expert) const { return layers_[static_cast<size_t>(layer)].places[expert]; }
  // The tokens of a u-batch chose the experts of a layer so many times each; nothing for a layer without cached ones.
  void note(int32_t layer, std::span<const int64_t> choices);
  // Behind a u-batch.
  void adapt();
  // Experts that came to a place since the session began.
  int64_t swapped() const { return swapped_; }

 private:
  struct Layer {
    std::vector<int32_t> places;  // by expert; empty without cached ones
    std::vector<int64_t> uses;    // by expert: choices, of which old ones count less
  };
  // Of an expert that is on its way.
  struct Swap {
    int32_t layer = 0, expert = 0, place = 0;
  };
  struct Candidate {
    int64_t gain = 0;  // by uses
    int32_t layer = 0, in = 0, out = 0;
  };
  // The weights of a layer's experts, and of its cached ones.
  std::vector<std::pair<model::WeightId, model::WeightId>> weights_of(int32_t layer) const;
  Candidate candidate(int32_t layer) const;
  void begin(const Candidate& chosen);
  // Whether all of the expert is there, so that launches from now on may read it.
  bool arrived(const Swap& swap);

  const plan::Plan& plan_;
  const model::ModelDesc& model_;
  Backend& cpu_;
  Backend& main_;
  std::vector<Layer> layers_;
  std::vector<Swap> under_way_;
  int64_t swapped_ = 0;
};

}  // namespace dyno::runtime
