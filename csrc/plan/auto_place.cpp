#include "plan/auto_place.h"

#include <algorithm>
#include <functional>
#include <iomanip>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "core/error.h"
#include "model/model_desc.h"
#include "plan/expert_cache.h"
#include "plan/mib.h"
#include "plan/remedies.h"

namespace dyno::plan {
namespace {

// Relative differences below this are below the accuracy of the cost model.
constexpr double kTie = 0.002;

std::string milliseconds(double seconds) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(seconds < 0.01 ? 2 : 1) << seconds * 1e3 << " ms";
  return out.str();
}

struct Candidate {
  int64_t n_cpu_moe = 0;
  std::optional<int64_t> n_gpu_layers = std::nullopt;
  int64_t cache_mib = 0;

  std::string describe(int64_t n_layers) const {
    std::string text;
    const auto add = [&](const std::string& part) { text += str_cat(text.empty() ? "" : "; ", part); };
    if (n_cpu_moe > 0) {
      add(str_cat("n_cpu_moe=", n_cpu_moe, ": the experts of the first ", std::min(n_cpu_moe, n_layers), " of ",
                  n_layers, " layers are on the CPU"));
    }
    if (cache_mib > 0) add(str_cat("expert_cache_mib=", cache_mib, ": the most used experts are on both"));
    if (n_gpu_layers) {
      add(*n_gpu_layers == 0 ? std::string("n_gpu_layers=0: all layers are on the CPU")
                             : str_cat("n_gpu_layers=", *n_gpu_layers, ": ", n_layers + 1 - *n_gpu_layers, " of ",
                                       n_layers, " layers are on the CPU"));
    }
    return text;
  }
};

// Placements in an order in which the main device holds less and less.
struct Chain {
  int64_t length = 0;
  std::function<Candidate(int64_t)> at;
};

class Search {
 public:
  Search(Plan whole, const model::ModelDesc& model, const std::vector<NamedRates>& rates, size_t free, size_t scratch)
      : whole_(std::move(whole)), model_(model), rates_(rates), free_(free), scratch_(scratch) {}

  Plan run() {
    const int64_t layers = model_.n_layers;
    const bool mixture = model_.moe_layers() > 0;
    // Chains that leave more on the main device come first, and win among equals.
    if (mixture) {
      const Chain experts{layers, [](int64_t i) { return Candidate{.n_cpu_moe = i + 1}; }};
      const int64_t first = look_along(experts);
      if (whole_.load.placement.choose_cache) look_at_caches(experts, first);
    }
    look_along({layers + 1, [&](int64_t i) { return Candidate{.n_gpu_layers = layers - i}; }});
    if (mixture) {
      look_along({layers, [&](int64_t i) { return Candidate{.n_cpu_moe = layers, .n_gpu_layers = layers - i}; }});
    }
    if (!best_) fail();
    best_->placement_note = note();
    return std::move(*best_);
  }

 private:
  // A plan that fits, and the expected seconds of the workload.
  struct Point {
    Plan plan;
    double seconds = 0;
  };

  Plan planned(const Candidate& candidate) const {
    LoadOptions load = whole_.load;
    load.placement.automatic = false;
    load.placement.n_cpu_moe = candidate.n_cpu_moe;
    load.placement.n_gpu_layers = candidate.n_gpu_layers;
    if (candidate.cache_mib > 0) load.expert_cache.mib = candidate.cache_mib;
    return build_plan(model_, whole_.main_device(), load, whole_.context, whole_.ubatch, whole_.mla_mode,
                      whole_.offload);
  }

  // The first placement that fits, or the length. Memory is monotone along a chain.
  int64_t first_that_fits(const Chain& chain) const {
    int64_t begin = 0, end = chain.length;
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      if (main_device_bytes(planned(chain.at(middle)), scratch_) <= free_) {
        end = middle;
      } else {
        begin = middle + 1;
      }
    }
    return begin;
  }

  // Searches a chain for the least time and returns the first placement that fits. Layers are mostly alike, so the time
  // is about linear along a chain. Doubling steps find the region of the minimum, and halving steps find the placement.
  int64_t look_along(const Chain& chain) {
    const int64_t first = first_that_fits(chain);
    if (first == chain.length) return first;
    std::map<int64_t, double> seen;
    const auto look = [&](int64_t i) {
      if (i < first || i >= chain.length || seen.count(i) > 0) return;
      const Candidate candidate = chain.at(i);
      const bool took = consider(candidate, planned(candidate), seen[i]);
      if (took && i == first) missed_ = first > 0 ? planned(chain.at(first - 1)) : whole_;
    };
    for (int64_t step = 1, i = first; i < chain.length; i += step, step *= 2) look(i);
    look(chain.length - 1);
    for (bool grown = true; grown;) {
      const auto least =
          std::min_element(seen.begin(), seen.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
      const int64_t at = least->first;
      const int64_t below = least == seen.begin() ? at : std::prev(least)->first;
      const int64_t above = std::next(least) == seen.end() ? at : std::next(least)->first;
      const size_t before = seen.size();
      look(at - (at - below) / 2);
      look(at + (above - at) / 2);
      grown = seen.size() > before;
    }
    return first;
  }

  // Tries placements with a cache: some layers keep all their experts on the main device, and the remaining memory
  // holds the most used experts of the other layers.
  void look_at_caches(const Chain& chain, int64_t first) {
    for (int64_t step = 1, i = first; i < chain.length; i += step, step *= 2) look_at_cache(chain.at(i));
    if (first < chain.length) look_at_cache(chain.at(chain.length - 1));
  }

  void look_at_cache(Candidate candidate) {
    const size_t without = main_device_bytes(planned(candidate), scratch_);
    if (without > free_) return;
    candidate.cache_mib = static_cast<int64_t>((free_ - without) >> 20);
    // Reduces the cache until the plan fits, because the additional ops of divided layers need memory too.
    while (candidate.cache_mib > 0) {
      Plan plan = planned(candidate);
      const auto chosen = choose_cached(plan, model_);
      if (std::all_of(chosen.begin(), chosen.end(), [](const auto& experts) { return experts.empty(); })) return;
      const model::ModelDesc cached = model::with_cached_experts(model_, chosen);
      const Plan divided =
          build_plan(cached, plan.main_device(), plan.load, plan.context, plan.ubatch, plan.mla_mode, plan.offload);
      const size_t bytes = main_device_bytes(divided, scratch_);
      if (bytes > free_) {
        candidate.cache_mib -= static_cast<int64_t>((bytes - free_) >> 20) + 1;
        continue;
      }
      double seconds = 0;
      consider(candidate, std::move(plan), seconds, &divided, &cached);
      return;
    }
  }

  // Keeps a candidate that is faster than the best one so far. `measured`: the plan that gives the expected time, with
  // the model that has cached experts.
  bool consider(const Candidate& candidate, Plan plan, double& seconds, const Plan* measured = nullptr,
                const model::ModelDesc* model = nullptr) {
    const Plan& timed = measured != nullptr ? *measured : plan;
    if (!host_fits(plan)) {
      fits_beside_host_ = true;
      seconds = std::numeric_limits<double>::infinity();
      return false;
    }
    seconds = workload_seconds(timed, model != nullptr ? *model : model_, rates_for(timed, rates_), {});
    if (best_ && seconds >= seconds_ * (1 - kTie)) return false;
    best_ = std::move(plan);
    chosen_ = candidate;
    seconds_ = seconds;
    missed_.reset();
    return true;
  }

  std::string note() const {
    const Plan& plan = *best_;
    const Workload workload;
    std::string text =
        str_cat("auto: the model takes ", mib(main_device_bytes(whole_, scratch_)), " and ",
                device_name(plan.main_device()), " has ", mib(free_), "; ", chosen_.describe(model_.n_layers),
                "; a prompt of ", std::min(workload.prompt, plan.context.ctx), " tokens and ", workload.generated,
                " generated ones are expected to take ", milliseconds(seconds_));
    if (!missed_) return text;
    const std::vector<DeviceRates> rates = rates_for(*missed_, rates_);
    if (workload_seconds(*missed_, model_, rates, workload) >= seconds_) return text;
    const size_t shortage = main_device_bytes(*missed_, scratch_) - free_;
    text += str_cat("; ", mib(shortage), " are missing for one more layer on ", device_name(plan.main_device()));
    const PlannedDevice& main = missed_->devices.front();
    const Holder holder{.device = kMainDevice,
                        .kv_bytes = main.kv_bytes,
                        .state_bytes = main.state_bytes,
                        .arena_bytes = main.arena_bytes,
                        .gpu = main.info.kind == DeviceKind::cuda};
    std::string enough;
    for (const Remedy& remedy : remedies(*missed_, holder, shortage, /*weights_loaded=*/true)) {
      if (remedy.frees >= shortage) enough += str_cat(enough.empty() ? ": " : " or ", remedy.text);
    }
    return text + (enough.empty() ? "" : enough + " frees that");
  }

  [[noreturn]] void fail() const {
    if (fits_beside_host_) {
      throw OutOfMemoryError(str_cat("[placement] auto: every placement that fits ", device_name(whole_.main_device()),
                                     " needs more memory on the CPU than its limit of ",
                                     mib(whole_.load.placement.host_memory),
                                     " (ram); use a larger limit, or a "
                                     "smaller ctx or ubatch"));
    }
    const Plan least = planned({.n_gpu_layers = 0});
    throw OutOfMemoryError(str_cat("[placement] auto: even without any layer, ", device_name(whole_.main_device()),
                                   " needs ", mib(main_device_bytes(least, scratch_)), ", but only ", mib(free_),
                                   " are free; use another main device, such as "
                                   "device=cpu, or a smaller ubatch than ",
                                   whole_.ubatch));
  }

  bool fits_beside_host_ = false;  // a placement exceeds only the CPU's limit
  Plan whole_;
  const model::ModelDesc& model_;
  const std::vector<NamedRates>& rates_;
  size_t free_, scratch_;
  std::optional<Plan> best_;
  Candidate chosen_;
  double seconds_ = 0;          // of the best placement
  std::optional<Plan> missed_;  // the best placement with one more layer on the main device, which does not fit
};

}  // namespace

double workload_seconds(const Plan& plan, const model::ModelDesc& model, const std::vector<DeviceRates>& rates,
                        const Workload& workload) {
  const int64_t prompt = std::min(workload.prompt, plan.context.ctx);
  double seconds = 0;
  for (int64_t done = 0; done < prompt; done += plan.ubatch) {
    const int64_t tokens = std::min(plan.ubatch, prompt - done);
    const bool last = done + tokens == prompt;
    seconds += estimate(plan, model, rates, {.tokens = tokens, .depth = done, .logit_rows = last ? 1 : 0}).seconds;
  }
  // The middle of the answer is the average depth.
  const int64_t depth = std::min(prompt + workload.generated / 2, plan.context.ctx - 1);
  const double token = estimate(plan, model, rates, {.tokens = 1, .depth = depth}).seconds;
  return seconds + static_cast<double>(workload.generated) * token;
}

size_t main_device_bytes(const Plan& plan, size_t scratch) {
  const PlannedDevice& main = plan.devices.front();
  const bool gpu = main.info.kind == DeviceKind::cuda;
  return main.weights_bytes + main.kv_bytes + main.state_bytes + main.least_arena_bytes + main.stream_bytes +
         (gpu ? scratch + kDeviceReserve : 0);
}

bool host_fits(const Plan& plan) {
  for (const PlannedDevice& device : plan.devices) {
    if (device.info.kind != DeviceKind::cpu || device.info.ordinal != 0 || device.memory_limit == 0) continue;
    const size_t held =
        device.weights_bytes + device.kv_bytes + device.state_bytes + device.arena_bytes + device.scratch_bytes;
    if (held > device.memory_limit) return false;
  }
  return true;
}

Plan place_automatically(Plan whole, const model::ModelDesc& model, const std::vector<NamedRates>& rates, size_t free,
                         size_t scratch, size_t cached) {
  if (main_device_bytes(whole, scratch) <= free || !has_cpu_beside(whole)) return whole;
  return Search(std::move(whole), model, rates, free - std::min(free, cached), scratch).run();
}

std::vector<DeviceRates> rates_for(const Plan& plan, const std::vector<NamedRates>& named) {
  std::vector<DeviceRates> rates;
  for (const PlannedDevice& device : plan.devices) {
    const std::string own = device_name(device.info);
    const NamedRates* found = nullptr;
    for (const NamedRates& one : named) {
      const bool shared = device.info.kind == DeviceKind::cpu && one.device == "cpu";
      const bool better = found == nullptr || found->device != own;
      if (one.device == own || (shared && better)) found = &one;  // the last one with this name
    }
    rates.push_back({.rates = found != nullptr ? found->rates : assumed_rates(device.info), .measured = {}});
  }
  return rates;
}

}  // namespace dyno::plan
