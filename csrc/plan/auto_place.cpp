#include "plan/auto_place.h"

#include <algorithm>
#include <iomanip>
#include <optional>
#include <sstream>

#include "core/error.h"
#include "plan/mib.h"
#include "plan/remedies.h"

namespace dyno::plan {
namespace {

// Differences of this share are below what a cost model can tell.
constexpr double kTie = 0.002;

std::string milliseconds(double seconds) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(seconds < 0.01 ? 2 : 1) << seconds * 1e3 << " ms";
  return out.str();
}

struct Candidate {
  int64_t n_cpu_moe = 0;
  std::optional<int64_t> n_gpu_layers = std::nullopt;

  std::string describe(int64_t n_layers) const {
    std::string text;
    if (n_cpu_moe > 0) {
      text = str_cat("n_cpu_moe=", n_cpu_moe, ": the experts of the first ", std::min(n_cpu_moe, n_layers), " of ",
                     n_layers, " layers lie on the CPU");
    }
    if (!n_gpu_layers) return text;
    const std::string separator = text.empty() ? "" : "; ";
    if (*n_gpu_layers == 0) return str_cat(text, separator, "n_gpu_layers=0: all layers lie on the CPU");
    return str_cat(text, separator, "n_gpu_layers=", *n_gpu_layers, ": ", n_layers + 1 - *n_gpu_layers, " of ",
                   n_layers, " layers lie on the CPU");
  }
};

class Search {
 public:
  Search(Plan whole, const model::ModelDesc& model, const std::vector<NamedRates>& rates, size_t free, size_t scratch)
      : whole_(std::move(whole)), model_(model), rates_(rates), free_(free), scratch_(scratch) {}

  Plan run() {
    const int64_t layers = model_.n_layers;
    // Those that leave more to the main device first: among equals they stay.
    std::vector<Candidate> candidates;
    if (model_.moe_layers() > 0) {
      for (int64_t n = 1; n <= layers; ++n) candidates.push_back({.n_cpu_moe = n});
    }
    for (int64_t n = layers; n >= 0; --n) {
      candidates.push_back({.n_gpu_layers = n});
      if (model_.moe_layers() > 0 && n > 0) candidates.push_back({.n_cpu_moe = layers, .n_gpu_layers = n});
    }
    std::optional<Plan> best;
    Candidate chosen;
    double seconds = 0;
    std::optional<Plan> last = whole_;  // the one before in this order, which did not fit
    std::optional<Plan> missed;
    for (const Candidate& candidate : candidates) {
      Plan plan = planned(candidate);
      if (main_device_bytes(plan, scratch_) > free_) {
        last = std::move(plan);
        continue;
      }
      if (!host_fits(plan)) {
        fits_beside_host_ = true;
        continue;
      }
      const double taken = workload_seconds(plan, model_, rates_for(plan, rates_), {});
      if (best && taken >= seconds * (1 - kTie)) continue;
      missed = last;
      last.reset();
      best = std::move(plan);
      chosen = candidate;
      seconds = taken;
    }
    if (!best) fail();
    best->placement_note = note(*best, chosen, missed, seconds);
    return std::move(*best);
  }

 private:
  Plan planned(const Candidate& candidate) const {
    LoadOptions load = whole_.load;
    load.placement.automatic = false;
    load.placement.n_cpu_moe = candidate.n_cpu_moe;
    load.placement.n_gpu_layers = candidate.n_gpu_layers;
    return build_plan(model_, whole_.main_device(), load, whole_.context, whole_.ubatch, whole_.mla_mode,
                      whole_.offload);
  }

  std::string note(const Plan& plan, const Candidate& chosen, const std::optional<Plan>& missed, double seconds) const {
    const Workload workload;
    std::string text =
        str_cat("auto: the model takes ", mib(main_device_bytes(whole_, scratch_)), " and ",
                device_name(plan.main_device()), " has ", mib(free_), "; ", chosen.describe(model_.n_layers),
                "; a prompt of ", std::min(workload.prompt, plan.context.ctx), " tokens and ", workload.generated,
                " generated ones are expected to take ", milliseconds(seconds));
    if (!missed) return text;
    const std::vector<DeviceRates> rates = rates_for(*missed, rates_);
    if (workload_seconds(*missed, model_, rates, workload) >= seconds) return text;
    const size_t shortage = main_device_bytes(*missed, scratch_) - free_;
    text += str_cat("; ", mib(shortage), " short of one more layer there");
    const PlannedDevice& main = missed->devices.front();
    const Holder holder{.device = kMainDevice,
                        .kv_bytes = main.kv_bytes,
                        .state_bytes = main.state_bytes,
                        .arena_bytes = main.arena_bytes,
                        .gpu = main.info.kind == DeviceKind::cuda};
    std::string enough;
    for (const Remedy& remedy : remedies(*missed, holder, shortage, /*weights_loaded=*/true)) {
      if (remedy.frees >= shortage) enough += str_cat(enough.empty() ? ": " : " or ", remedy.text);
    }
    return text + (enough.empty() ? "" : enough + " frees that");
  }

  [[noreturn]] void fail() const {
    if (fits_beside_host_) {
      throw OutOfMemoryError(str_cat("[placement] auto: each placement that ", device_name(whole_.main_device()),
                                     " has room for puts more on the CPU than its limit of ",
                                     mib(whole_.load.placement.host_memory),
                                     " (ram); use a larger limit, or a "
                                     "smaller ctx or ubatch"));
    }
    const Plan least = planned({.n_gpu_layers = 0});
    throw OutOfMemoryError(str_cat("[placement] auto: even without any layer ", device_name(whole_.main_device()),
                                   " would hold ", mib(main_device_bytes(least, scratch_)), ", and ", mib(free_),
                                   " are free: use another main device, such as "
                                   "device=cpu, or a smaller ubatch than ",
                                   whole_.ubatch));
  }

  bool fits_beside_host_ = false;  // a placement that the CPU's limit alone forbids
  Plan whole_;
  const model::ModelDesc& model_;
  const std::vector<NamedRates>& rates_;
  size_t free_, scratch_;
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
  // In the middle of the answer.
  const int64_t depth = std::min(prompt + workload.generated / 2, plan.context.ctx - 1);
  const double token = estimate(plan, model, rates, {.tokens = 1, .depth = depth}).seconds;
  return seconds + static_cast<double>(workload.generated) * token;
}

size_t main_device_bytes(const Plan& plan, size_t scratch) {
  const PlannedDevice& main = plan.devices.front();
  const bool gpu = main.info.kind == DeviceKind::cuda;
  return main.weights_bytes + main.kv_bytes + main.state_bytes + main.arena_bytes + main.stream_bytes +
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
      if (one.device == own || (shared && better)) found = &one;  // the last of a name
    }
    rates.push_back({.rates = found != nullptr ? found->rates : assumed_rates(device.info), .measured = {}});
  }
  return rates;
}

}  // namespace dyno::plan
