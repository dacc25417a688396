#include "core/error.h"
#include "model/model_desc.h"

namespace dyno::model {
namespace {

class Adding {
 public:
  Adding(ModelDesc& model, FfnSpec& spec, const std::vector<int32_t>& experts)
      : model_(model), spec_(spec), experts_(experts) {}

  void run() {
    for (const int32_t expert : experts_) {
      DYNO_CHECK(PlanError, expert >= 0 && expert < spec_.experts, "[experts] expert ", expert, " of ", spec_.experts,
                 " cannot be cached");
    }
    spec_.cached.experts = experts_;
    spec_.cached.gate = copy(spec_.experts_gate);
    spec_.cached.up = copy(spec_.experts_up);
    spec_.cached.down = copy(spec_.experts_down);
    spec_.cached.gate_bias = copy(spec_.experts_gate_bias);
    spec_.cached.up_bias = copy(spec_.experts_up_bias);
    spec_.cached.down_bias = copy(spec_.experts_down_bias);
  }

 private:
  WeightId copy(WeightId id) {
    if (id == kNone) return kNone;
    Weight weight = model_.weight(id);
    weight.name += " (cached)";
    weight.batch = static_cast<int64_t>(experts_.size());
    weight.picks = experts_;
    weight.scales = kNone;  // applied to the weights of the sum, together with those of the other experts
    model_.weights.push_back(std::move(weight));
    return static_cast<WeightId>(model_.weights.size() - 1);
  }

  ModelDesc& model_;
  FfnSpec& spec_;
  const std::vector<int32_t>& experts_;
};

}  // namespace

bool can_cache_experts(const ModelDesc& model, const FfnSpec& spec) {
  // Factors of single experts are looked up by their number after the product.
  for (const WeightId id : {spec.experts_gate, spec.experts_up}) {
    if (id != kNone && model.weight(id).scales != kNone) return false;
  }
  for (const WeightId id : {spec.experts_gate, spec.experts_up, spec.experts_down}) {
    if (id != kNone && model.weight(id).transform != Transform::none) return false;
  }
  return true;
}

ModelDesc with_cached_experts(ModelDesc model, const std::vector<std::vector<int32_t>>& experts) {
  DYNO_CHECK(PlanError, experts.size() == model.layers.size(), "[experts] cached experts of ", experts.size(),
             " layers for a model of ", model.layers.size());
  for (size_t i = 0; i < experts.size(); ++i) {
    if (experts[i].empty()) continue;
    FfnSpec* spec = model.layers[i].mixture();
    DYNO_CHECK(PlanError, spec != nullptr && can_cache_experts(model, *spec), "[experts] experts of layer ", i,
               " cannot be cached");
    Adding(model, *spec, experts[i]).run();
  }
  return model;
}

}  // namespace dyno::model
