// The current set of CPU experts that are cached on the main device. The plan has the set at load. If the cache adapts,
// an expert that is chosen more often replaces another one of its layer.
//
// A replacement happens between two u-batches. First the old expert stops being cached, then the new one is copied to
// its place concurrently with the computation, and it counts as cached when the copy has arrived. So no launch reads a
// place that changes, and no memory beyond the plan's is needed.
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
  // All arguments must outlive it. `main`: the backend of the main device.
  ExpertPlaces(const plan::Plan& plan, const model::ModelDesc& model, Backend& cpu, Backend& main);

  // The place of an expert in a layer with cached experts; -1 if it is not cached.
  int32_t of(int32_t layer, size_t expert) const { return layers_[static_cast<size_t>(layer)].places[expert]; }
  // Records how often the tokens of a u-batch chose each expert of a layer. Does nothing for a layer without cached
  // experts.
  void note(int32_t layer, std::span<const int64_t> choices);
  // Called after each u-batch.
  void adapt();
  // Number of replacements since the session began.
  int64_t swapped() const { return swapped_; }

 private:
  struct Layer {
    std::vector<int32_t> places;  // by expert; empty if the layer has no cached experts
    std::vector<int64_t> uses;    // by expert: choices, with less weight for old ones
  };
  // A replacement whose copy has not arrived yet.
  struct Swap {
    int32_t layer = 0, expert = 0, place = 0;
  };
  struct Candidate {
    int64_t gain = 0;  // difference of uses
    int32_t layer = 0, in = 0, out = 0;
  };
  // Pairs of the layer's expert weights and their cached copies.
  std::vector<std::pair<model::WeightId, model::WeightId>> weights_of(int32_t layer) const;
  Candidate candidate(int32_t layer) const;
  void begin(const Candidate& chosen);
  // Whether the expert's copies have all arrived, so that later launches may read it.
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
