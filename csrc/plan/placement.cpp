#include "plan/placement.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <regex>

#include "core/error.h"

namespace dyno::plan {
namespace {

using model::kNone;
using model::WeightId;

constexpr int64_t kMostVirtualDevices = 16;
// The library's matcher recurses for each character of the pattern.
constexpr size_t kLongestRule = 1000;

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

// Also accepts the spelling of llama.cpp: CPU, CUDA0.
bool names(std::string_view text, const DeviceInfo& device) {
  const std::string name = lower(text);
  return name == device_name(device) || (device.kind == DeviceKind::cuda && name == str_cat("cuda", device.ordinal));
}

bool is_host(const DeviceInfo& device) { return device.kind == DeviceKind::cpu && device.ordinal == 0; }

void check_virtual(const std::string& name, const VirtualDevice& device) {
  // Values outside these limits (slower than a modem, or a latency above a second) are probably errors of units.
  constexpr double kSlowest = 1e6, kFastest = 1e15, kLongest = 1;
  const double rate = device.link.bytes_per_second;
  DYNO_CHECK(PlanError, rate == 0 || (rate >= kSlowest && rate <= kFastest), "[placement] link_gbps of ", name, " is ",
             rate / 1e9, "; expected ", kSlowest / 1e9, " to ", kFastest / 1e9, " (GB/s)");
  const double latency = device.link.latency_seconds;
  DYNO_CHECK(PlanError, latency >= 0 && latency <= kLongest, "[placement] latency_us of ", name, " is ", latency * 1e6,
             "; expected 0 to ", kLongest * 1e6);
  constexpr size_t kMostBytes = size_t{1} << 50;
  DYNO_CHECK(PlanError, device.memory_bytes <= kMostBytes, "[placement] memory_mib of ", name, " is ",
             device.memory_bytes >> 20, "; expected at most ", kMostBytes >> 20);
}

class Placing {
 public:
  Placing(const Plan& plan, const model::ModelDesc& model)
      : plan_(plan), model_(model), options_(plan.load.placement), placed_(model.weights.size(), kUnplaced) {}

  std::vector<DeviceId> run() {
    for (size_t i = 0; i < model_.weights.size(); ++i) {
      if (!model_.weights[i].picks.empty()) put(i, kMainDevice);
    }
    for (const std::string& rule : options_.rules) apply(rule);
    experts();
    layers();
    split();
    std::replace(placed_.begin(), placed_.end(), kUnplaced, kMainDevice);
    return placed_;
  }

 private:
  static constexpr DeviceId kUnplaced = -1;

  // The first placement of a weight wins.
  void put(size_t weight, DeviceId device) {
    if (placed_[weight] == kUnplaced) placed_[weight] = device;
  }

  void apply(const std::string& rule) {
    const size_t equals = rule.rfind('=');
    DYNO_CHECK(PlanError, equals != std::string::npos && equals > 0 && equals + 1 < rule.size(), "[placement] rule '",
               rule, "' is not REGEX=DEVICE; an example: ffn_(up|gate|down)_exps=CPU");
    DYNO_CHECK(PlanError, rule.size() <= kLongestRule, "[placement] a rule has ", rule.size(), " characters; at most ",
               kLongestRule, " are read");
    const std::regex regex = parse(rule, rule.substr(0, equals));
    const std::vector<size_t> matched = matches(rule, regex);
    DYNO_CHECK(PlanError, !matched.empty(), "[placement] rule '", rule,
               "' matches no tensor of the model; tensors are ", "called, for example, ",
               model_.weights.back().tensor->name, "; `dyno explain gguf` lists them");
    const DeviceId device = device_named(rule, rule.substr(equals + 1));
    for (const size_t weight : matched) put(weight, device);
  }

  static std::regex parse(const std::string& rule, const std::string& text) {
    try {
      return std::regex(text, std::regex::ECMAScript | std::regex::optimize);
    } catch (const std::regex_error& error) {
      throw PlanError(
          str_cat("[placement] rule '", rule, "': '", text, "' is not a regular expression: ", error.what()));
    }
  }

  std::vector<size_t> matches(const std::string& rule, const std::regex& regex) const {
    std::vector<size_t> found;
    try {
      for (size_t i = 0; i < model_.weights.size(); ++i) {
        const std::string_view name = model_.weights[i].tensor->name;
        if (std::regex_search(name.begin(), name.end(), regex)) found.push_back(i);
      }
    } catch (const std::regex_error& error) {
      throw PlanError(str_cat("[placement] rule '", rule, "' is too complex to match: ", error.what()));
    }
    return found;
  }

  DeviceId device_named(const std::string& rule, const std::string& name) const {
    std::string known;
    for (size_t i = 0; i < plan_.devices.size(); ++i) {
      const DeviceInfo& device = plan_.devices[i].info;
      if (names(name, device)) return static_cast<DeviceId>(i);
      known += str_cat(known.empty() ? "" : ", ", device_name(device));
    }
    const bool gpu = plan_.main_device().kind == DeviceKind::cuda;
    throw PlanError(str_cat("[placement] rule '", rule, "' names device '", name, "'; this plan has ", known,
                            gpu ? "" : "; the setting virtual_devices adds cpu:1, cpu:2, …"));
  }

  // The CPU itself, for a setting that moves weights there.
  DeviceId host(const std::string& setting) const {
    for (size_t i = 0; i < plan_.devices.size(); ++i) {
      if (is_host(plan_.devices[i].info)) return static_cast<DeviceId>(i);
    }
    throw PlanError(str_cat("[placement] ", setting, " moves weights to the CPU, but ",
                            device_name(plan_.main_device()), " is the only device of this plan; leave it out"));
  }

  void experts() {
    DYNO_CHECK(PlanError, options_.n_cpu_moe >= 0, "[placement] n_cpu_moe is ", options_.n_cpu_moe,
               "; expected 0 or more");
    if (!options_.cpu_moe && options_.n_cpu_moe == 0) return;
    const std::string setting = options_.cpu_moe ? std::string("cpu_moe") : str_cat("n_cpu_moe=", options_.n_cpu_moe);
    DYNO_CHECK(PlanError, model_.moe_layers() > 0, "[placement] ", setting,
               ": this model has no experts; leave the setting out");
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      if (!options_.cpu_moe && static_cast<int64_t>(i) >= options_.n_cpu_moe) break;
      const model::FfnSpec* mixture = model_.layers[i].mixture();
      if (mixture == nullptr) continue;
      const model::FfnSpec& f = *mixture;
      for (const WeightId id : {f.experts_gate, f.experts_up, f.experts_down}) {
        if (id != kNone) put(static_cast<size_t>(id), host(setting));
      }
    }
  }

  void layers() {
    if (!options_.n_gpu_layers) return;
    const int64_t wanted = *options_.n_gpu_layers;
    DYNO_CHECK(PlanError, wanted >= 0, "[placement] n_gpu_layers is ", wanted, "; expected 0 or more");
    const std::string setting = str_cat("n_gpu_layers=", wanted);
    DYNO_CHECK(PlanError, !is_host(plan_.main_device()), "[placement] ", setting,
               " needs a device beside the CPU, and the device is cpu; leave it out, or name a GPU");
    // The output counts as one more layer, after all others.
    const int64_t first = model_.n_layers + 1 - wanted;
    if (first <= 0) return;
    for (size_t i = 0; i < model_.weights.size(); ++i) {
      const int64_t layer = layer_of(model_.weights[i].name);
      const bool stays = layer >= 0 ? layer >= first : of_output(static_cast<WeightId>(i)) && wanted > 0;
      if (!stays) put(i, host(setting));
    }
  }

  // The devices over which layers are split, in ascending order.
  std::vector<DeviceId> split_devices() const {
    std::vector<DeviceId> over;
    for (size_t i = 0; i < plan_.devices.size(); ++i) {
      if (!is_host(plan_.devices[i].info)) over.push_back(static_cast<DeviceId>(i));
    }
    std::sort(over.begin(), over.end(),
              [&](DeviceId a, DeviceId b) { return plan_.device(a).ordinal < plan_.device(b).ordinal; });
    return over;
  }

  std::vector<double> shares_of(const std::vector<DeviceId>& over) const {
    std::vector<double> shares = options_.shares;
    if (shares.empty()) {
      for (const DeviceId id : over) {
        const PlannedDevice& device = plan_.devices[static_cast<size_t>(id)];
        const bool limited = device.memory_limit > 0;
        shares.push_back(static_cast<double>(
            limited ? device.memory_limit : static_cast<size_t>(std::max<int64_t>(device.info.memory_bytes, 0))));
      }
      const bool unknown = std::any_of(shares.begin(), shares.end(), [](double share) { return share <= 0; });
      if (unknown) std::fill(shares.begin(), shares.end(), 1.0);
    }
    DYNO_CHECK(PlanError, shares.size() == over.size(), "[placement] tensor_split has ", shares.size(),
               " shares, and layers are split over ", over.size(), " devices; give one share for each");
    double sum = 0;
    for (const double share : shares) {
      DYNO_CHECK(PlanError, std::isfinite(share) && share >= 0, "[placement] tensor_split holds ", share,
                 "; expected 0 or more");
      sum += share;
    }
    DYNO_CHECK(PlanError, sum > 0, "[placement] all shares of tensor_split are 0; at least one must be more");
    for (double& share : shares) share /= sum;
    return shares;
  }

  // Splits the layers in their order over several devices, in proportion to their shares. The output counts as one more
  // layer, and the token embedding is on the main device.
  void split() {
    if (!options_.split_layers) {
      DYNO_CHECK(PlanError, options_.shares.empty(), "[placement] tensor_split needs split=layer");
      return;
    }
    const std::vector<DeviceId> over = split_devices();
    DYNO_CHECK(
        PlanError, over.size() > 1, "[placement] split=layer needs two GPUs or two virtual devices, and this ",
        "plan has ", over.size(),
        plan_.main_device().kind == DeviceKind::cuda ? "" : "; the setting virtual_devices adds cpu:1, cpu:2, …");
    const std::vector<double> shares = shares_of(over);
    const int64_t all = model_.n_layers + 1;
    const int64_t first = std::max<int64_t>(0, all - options_.n_gpu_layers.value_or(all));
    const auto device_of = [&](int64_t layer) {
      const double place = static_cast<double>(layer - first) / static_cast<double>(std::max<int64_t>(1, all - first));
      double reached = 0;
      size_t last = 0;
      for (size_t i = 0; i < over.size(); ++i) {
        if (shares[i] > 0) last = i;
        reached += shares[i];
        if (place < reached * (1 - 1e-12)) return over[i];
      }
      return over[last];
    };
    for (size_t i = 0; i < model_.weights.size(); ++i) {
      const int64_t layer = layer_of(model_.weights[i].name);
      if (layer >= 0) {
        put(i, device_of(layer));
      } else if (of_output(static_cast<WeightId>(i))) {
        put(i, device_of(model_.n_layers));
      }
    }
  }

  bool of_output(WeightId id) const {
    return id == model_.output || id == model_.output_norm || id == model_.output_bias;
  }

  const Plan& plan_;
  const model::ModelDesc& model_;
  const PlacementOptions& options_;
  std::vector<DeviceId> placed_;
};

}  // namespace

int64_t layer_of(std::string_view name) {
  constexpr std::string_view kPrefix = "blk.";
  int64_t layer = -1;
  if (!name.starts_with(kPrefix)) return layer;
  std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), layer);
  return layer;
}

std::vector<PlannedDevice> plan_devices(const DeviceInfo& main, const PlacementOptions& options) {
  const auto count = static_cast<int64_t>(options.virtual_devices.size());
  DYNO_CHECK(PlanError, count <= kMostVirtualDevices, "[placement] virtual_devices is ", count, "; expected 0 to ",
             kMostVirtualDevices);
  if (main.kind == DeviceKind::cuda) {
    DYNO_CHECK(PlanError, count == 0, "[placement] virtual_devices is ", count, " with device ", device_name(main),
               "; virtual devices need the CPU as the main device");
    std::vector<PlannedDevice> devices(1);
    devices.front().info = main;
    devices.front().streams = true;
    devices.front().memory_limit = options.main_memory;
    for (const DeviceInfo& device : options.beside_gpu) {
      if (device.kind == main.kind && device.ordinal == main.ordinal) continue;
      devices.emplace_back().info = device;
      if (is_host(device)) devices.back().memory_limit = options.host_memory;
    }
    return devices;
  }
  DYNO_CHECK(PlanError, main.ordinal > 0 || options.main_memory == 0,
             "[placement] vram limits a GPU or a virtual device, and the device is cpu; use ram instead");
  DYNO_CHECK(PlanError, main.ordinal <= count, "[placement] device ", device_name(main),
             " does not exist; it needs virtual_devices=", main.ordinal, " or more, and that is ", count);
  std::vector<PlannedDevice> devices;
  for (int ordinal = 0; ordinal <= static_cast<int>(count); ++ordinal) {
    PlannedDevice device;
    device.info = main;
    device.info.ordinal = ordinal;
    if (ordinal > 0) {
      const VirtualDevice& asked = options.virtual_devices[static_cast<size_t>(ordinal) - 1];
      check_virtual(device_name(device.info), asked);
      device.link = asked.link;
      device.memory_limit = asked.memory_bytes;
      device.streams = asked.streams;
    } else {
      device.memory_limit = options.host_memory;
    }
    if (ordinal == main.ordinal && options.main_memory > 0) {
      const size_t own = device.memory_limit;
      device.memory_limit = own > 0 ? std::min(own, options.main_memory) : options.main_memory;
    }
    devices.insert(ordinal == main.ordinal ? devices.begin() : devices.end(), std::move(device));
  }
  return devices;
}

double transfer_seconds(const Link& from, const Link& to, size_t bytes) {
  double slowest = 0;  // seconds per byte
  for (const Link& link : {from, to}) {
    if (link.bytes_per_second > 0) slowest = std::max(slowest, 1 / link.bytes_per_second);
  }
  return from.latency_seconds + to.latency_seconds + slowest * static_cast<double>(bytes);
}

std::vector<DeviceId> weight_devices(const Plan& plan, const model::ModelDesc& model) {
  return Placing(plan, model).run();
}

}  // namespace dyno::plan
