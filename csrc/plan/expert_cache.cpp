#include "plan/expert_cache.h"

#include <algorithm>
#include <numeric>

#include "core/checked.h"
#include "core/error.h"
#include "plan/mib.h"
#include "plan/passes/passes.h"

namespace dyno::plan {

using model::WeightId;

namespace {

bool is_host(const Plan& plan, WeightId id) {
  const DeviceInfo& at = plan.device_of(id);
  return at.kind == DeviceKind::cpu && at.ordinal == 0 && plan.weights[static_cast<size_t>(id)].device != kMainDevice;
}

// The experts of a layer if they can be cached, else null.
const model::FfnSpec* cacheable(const Plan& plan, const model::ModelDesc& model, const model::LayerSpec& layer) {
  const model::FfnSpec* f = layer.mixture();
  if (f == nullptr || !model::can_cache_experts(model, *f)) return nullptr;
  if (plan.weights[static_cast<size_t>(f->router)].device != kMainDevice) return nullptr;
  for (const WeightId id : {f->experts_gate, f->experts_up, f->experts_down}) {
    if (id == model::kNone) continue;
    if (!is_host(plan, id)) return nullptr;
    const DeviceInfo& gpu = plan.main_device();
    if (gpu.kind == DeviceKind::cuda && !why_not_on_gpu(model.weight(id), gpu).empty()) return nullptr;
  }
  return f;
}

// The weight of such a layer that prevents a move of experts to the main device while tokens run; kNone if nothing
// prevents it.
WeightId hinders_swaps(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f) {
  if (plan.main_device().kind != DeviceKind::cuda) return model::kNone;
  for (const WeightId id : {f.experts_gate, f.experts_up, f.experts_down}) {
    if (id == model::kNone) continue;
    if (!can_refill(plan, model.weight(id), plan.weights[static_cast<size_t>(id)])) return id;
  }
  return model::kNone;
}

// Bytes of one expert on the main device.
size_t expert_bytes(const Plan& plan, const model::ModelDesc& model, const model::FfnSpec& f) {
  size_t bytes = 0;
  for (const WeightId id :
       {f.experts_gate, f.experts_up, f.experts_down, f.experts_gate_bias, f.experts_up_bias, f.experts_down_bias}) {
    if (id == model::kNone) continue;
    model::Weight one = model.weight(id);
    one.batch = 1;
    bytes = checked_add(bytes, placed_bytes(plan, one), "a cached expert");
  }
  return bytes;
}

// Throws PlanError if the counts were recorded with another model. A slice of a model has its first layers.
void check_uses(const Plan& plan, const model::ModelDesc& model) {
  const std::vector<std::vector<int64_t>>& uses = plan.load.expert_cache.uses;
  if (uses.empty()) return;
  const auto layers = static_cast<size_t>(model.moe_layers());
  const bool slice = plan.load.layers > 0;
  DYNO_CHECK(PlanError, uses.size() == layers || (slice && uses.size() > layers), "[experts] the recorded counts have ",
             uses.size(), " layers with experts, but this model has ", layers,
             "; record them with this model (`dyno experts`)");
  const auto experts = static_cast<size_t>(model.experts());  // of the layer with the most experts
  for (size_t i = 0; i < uses.size(); ++i) {
    DYNO_CHECK(PlanError, uses[i].size() == experts, "[experts] the recorded counts have ", uses[i].size(),
               " experts in layer ", i, " of the layers with experts, but this model has ", experts,
               "; record them with this model (`dyno experts`)");
  }
}

struct CacheCandidate {
  double use = 0;  // recorded count per byte
  size_t layer = 0;
  int32_t expert = 0;
  size_t bytes = 0;
};

}  // namespace

const std::vector<int64_t>* recorded_uses(const Plan& plan, const model::ModelDesc& model, size_t layer) {
  const std::vector<std::vector<int64_t>>& uses = plan.load.expert_cache.uses;
  if (uses.empty()) return nullptr;
  size_t mixture = 0;
  for (size_t i = 0; i < layer; ++i) mixture += model.layers[i].mixture() != nullptr ? 1 : 0;
  return &uses[mixture];
}

std::vector<std::vector<int32_t>> choose_cached(const Plan& plan, const model::ModelDesc& model) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t wanted = plan.load.expert_cache.mib;
  DYNO_CHECK(PlanError, wanted >= 0 && wanted <= kMost, "[experts] expert_cache_mib is ", wanted, "; expected 0 to ",
             kMost);
  const bool adaptive = plan.load.expert_cache.adaptive;
  check_uses(plan, model);
  std::vector<std::vector<int32_t>> chosen(model.layers.size());
  std::vector<CacheCandidate> candidates;
  WeightId hinders = model::kNone;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const model::FfnSpec* f = cacheable(plan, model, model.layers[i]);
    if (f == nullptr) continue;
    if (const WeightId id = adaptive ? hinders_swaps(plan, model, *f) : model::kNone; id != model::kNone) {
      hinders = id;
      continue;
    }
    const std::vector<int64_t>* uses = recorded_uses(plan, model, i);
    const size_t bytes = expert_bytes(plan, model, *f);
    for (int32_t expert = 0; expert < f->experts; ++expert) {
      const auto use = uses == nullptr ? 1 : (*uses)[static_cast<size_t>(expert)];
      if (use == 0 && !adaptive) continue;
      candidates.push_back(
          {.use = static_cast<double>(use) / static_cast<double>(bytes), .layer = i, .expert = expert, .bytes = bytes});
    }
  }
  DYNO_CHECK(PlanError, hinders == model::kNone || !candidates.empty() || wanted == 0,
             "[experts] expert_cache=adaptive copies experts in their type on the CPU, but these are ",
             dtype_name(model.weight(hinders).type), ", which ", device_name(plan.main_device()),
             " reads as another type; use expert_cache=static, with recorded counts of a text like yours (`dyno "
             "experts`)");
  // Among equals, the first experts of each layer, so that without recorded counts all layers cache the same number.
  std::stable_sort(candidates.begin(), candidates.end(), [](const CacheCandidate& a, const CacheCandidate& b) {
    return a.use != b.use ? a.use > b.use : a.expert < b.expert;
  });
  size_t left = static_cast<size_t>(wanted) << 20;
  for (const CacheCandidate& one : candidates) {
    if (one.bytes > left) continue;
    left -= one.bytes;
    chosen[one.layer].push_back(one.expert);
  }
  // Sorted, so that neighbours in the file are neighbours in the cache and can be copied together.
  for (std::vector<int32_t>& experts : chosen) std::sort(experts.begin(), experts.end());
  return chosen;
}

double cached_share(const Plan& plan, const model::ModelDesc& model, int32_t layer) {
  const auto at = static_cast<size_t>(layer);
  const model::FfnSpec& f = *model.layers[at].mixture();
  const std::vector<int32_t>& cached = f.cached.experts;
  const std::vector<int64_t>* uses = recorded_uses(plan, model, at);
  const double all = uses == nullptr ? 0 : static_cast<double>(std::accumulate(uses->begin(), uses->end(), int64_t{0}));
  if (all <= 0) return static_cast<double>(cached.size()) / static_cast<double>(f.experts);
  double hits = 0;
  for (const int32_t expert : cached) hits += static_cast<double>((*uses)[static_cast<size_t>(expert)]);
  return hits / all;
}

std::string why_none_cached(const Plan& plan, const model::ModelDesc& model) {
  const int64_t wanted = plan.load.expert_cache.mib;
  if (wanted == 0 || plan.cached_bytes > 0) return "";
  size_t smallest = SIZE_MAX;
  for (const model::LayerSpec& layer : model.layers) {
    const model::FfnSpec* f = cacheable(plan, model, layer);
    if (f != nullptr) smallest = std::min(smallest, expert_bytes(plan, model, *f));
  }
  const std::string main = device_name(plan.main_device());
  std::string why = "the recorded text used no expert that fits";
  if (smallest > static_cast<size_t>(wanted) << 20)
    why = str_cat("the smallest one takes ", mib(smallest), " on ", main);
  if (smallest == SIZE_MAX) why = str_cat("no experts that ", main, " can cache are on the CPU");
  return str_cat("[experts] expert_cache_mib=", wanted, " caches no expert: ", why);
}

}  // namespace dyno::plan
