#include "runtime/expert_places.h"

#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "plan/expert_cache.h"

namespace dyno::runtime {
namespace {

// All counts are halved when they contain the choices of twice this many tokens.
constexpr int64_t kTokens = 256;
// Maximum of concurrent copies. More would flood a slow link, on which other copies would wait.
constexpr size_t kUnderWay = 4;
// The minimum advantage, as a number and as a fraction, of a new expert over the old one. It prevents two experts of
// similar use from replacing each other repeatedly.
constexpr int64_t kLeastGain = 4, kGainPart = 4;

}  // namespace

ExpertPlaces::ExpertPlaces(const plan::Plan& plan, const model::ModelDesc& model, Backend& cpu, Backend& main)
    : plan_(plan), model_(model), cpu_(cpu), main_(main), layers_(plan.expert_places.size()) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    Layer& layer = layers_[i];
    layer.places = plan.expert_places[i];
    layer.uses.assign(layer.places.size(), 0);
    if (layer.places.empty()) continue;
    const std::vector<int64_t>* recorded = plan::recorded_uses(plan, model, i);
    if (recorded == nullptr) continue;
    // Scaled to the choices of kTokens tokens.
    const int64_t all = std::accumulate(recorded->begin(), recorded->end(), int64_t{0});
    const auto scale = static_cast<double>(kTokens * model.layers[i].mixture()->used) / static_cast<double>(all);
    for (size_t expert = 0; all > 0 && expert < layer.uses.size(); ++expert) {
      layer.uses[expert] = static_cast<int64_t>(static_cast<double>((*recorded)[expert]) * scale);
    }
  }
}

std::vector<std::pair<model::WeightId, model::WeightId>> ExpertPlaces::weights_of(int32_t layer) const {
  const model::FfnSpec& f = *model_.layers[static_cast<size_t>(layer)].mixture();
  std::vector<std::pair<model::WeightId, model::WeightId>> found;
  for (const auto& [all, cached] :
       {std::pair(f.experts_gate, f.cached.gate), std::pair(f.experts_up, f.cached.up),
        std::pair(f.experts_down, f.cached.down), std::pair(f.experts_gate_bias, f.cached.gate_bias),
        std::pair(f.experts_up_bias, f.cached.up_bias), std::pair(f.experts_down_bias, f.cached.down_bias)}) {
    if (all != model::kNone) found.emplace_back(all, cached);
  }
  return found;
}

void ExpertPlaces::note(int32_t layer, std::span<const int64_t> choices) {
  Layer& to = layers_[static_cast<size_t>(layer)];
  if (to.places.empty()) return;
  for (size_t expert = 0; expert < choices.size(); ++expert) {
    to.uses[expert] += choices[expert];
  }
  // A u-batch of many tokens adds its choices at once; halving all counts keeps their proportions.
  const int64_t most = 2 * kTokens * model_.layers[static_cast<size_t>(layer)].mixture()->used;
  while (std::accumulate(to.uses.begin(), to.uses.end(), int64_t{0}) >= most) {
    for (int64_t& uses : to.uses) uses /= 2;
  }
}

bool ExpertPlaces::arrived(const Swap& swap) {
  for (const auto& [all, cached] : weights_of(swap.layer)) {
    if (!main_.has_arrived(cached)) return false;
  }
  Layer& layer = layers_[static_cast<size_t>(swap.layer)];
  layer.places[static_cast<size_t>(swap.expert)] = swap.place;
  main_.set_cached_places(swap.layer, layer.places);
  ++swapped_;
  return true;
}

// The most used expert that is not cached, and the least used cached one.
ExpertPlaces::Candidate ExpertPlaces::candidate(int32_t layer) const {
  const Layer& of = layers_[static_cast<size_t>(layer)];
  constexpr size_t kNone = SIZE_MAX;
  size_t in = kNone, out = kNone;
  for (size_t i = 0; i < of.places.size(); ++i) {
    if (of.places[i] < 0) {
      if (in == kNone || of.uses[i] > of.uses[in]) in = i;
    } else if (out == kNone || of.uses[i] < of.uses[out]) {
      out = i;
    }
  }
  if (in == kNone || out == kNone) return {};
  const int64_t gain = of.uses[in] - of.uses[out];
  if (gain < std::max(kLeastGain, of.uses[out] / kGainPart)) return {};
  return {.gain = gain, .layer = layer, .in = static_cast<int32_t>(in), .out = static_cast<int32_t>(out)};
}

void ExpertPlaces::begin(const Candidate& chosen) {
  Layer& layer = layers_[static_cast<size_t>(chosen.layer)];
  int32_t& place = layer.places[static_cast<size_t>(chosen.out)];
  under_way_.push_back({.layer = chosen.layer, .expert = chosen.in, .place = place});
  const int32_t freed = std::exchange(place, -1);
  main_.set_cached_places(chosen.layer, layer.places);
  for (const auto& [all, cached] : weights_of(chosen.layer)) {
    main_.fill_place(all, cpu_.weight_memory(all), chosen.in, cached, freed);
  }
}

void ExpertPlaces::adapt() {
  if (!plan_.load.expert_cache.adaptive) return;
  std::erase_if(under_way_, [&](const Swap& swap) { return arrived(swap); });
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto layer = static_cast<int32_t>(i);
    if (layers_[i].places.empty()) continue;
    note(layer, main_.take_choices(layer));
    const bool busy =
        std::any_of(under_way_.begin(), under_way_.end(), [&](const Swap& swap) { return swap.layer == layer; });
    if (busy) continue;
    if (const Candidate found = candidate(layer); found.gain > 0) candidates.push_back(found);
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.gain > b.gain; });
  for (const Candidate& chosen : candidates) {
    if (under_way_.size() == kUnderWay) break;
    begin(chosen);
  }
}

}  // namespace dyno::runtime
