#include "bindings/read_placement.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/convert.h"
#include "bindings/ops_convert.h"
#include "core/error.h"

namespace nb = nanobind;

namespace dyno {
namespace {

std::vector<plan::VirtualDevice> read_virtual_devices(const nb::dict& dict) {
  std::vector<plan::VirtualDevice> devices;
  if (!dict.contains("virtual_devices")) return devices;
  std::vector<nb::dict> given;
  DYNO_CHECK(ProfileError, nb::try_cast(nb::borrow(dict["virtual_devices"]), given),
             "[settings] placement setting virtual_devices is not a list of dicts");
  for (const nb::dict& one : given) {
    SettingsReader r(one, "virtual device");
    plan::VirtualDevice device;
    device.link.bytes_per_second = r.number("link_gbps", 0) * 1e9;
    device.link.latency_seconds = r.number("latency_us", 0) * 1e-6;
    const double mib = r.number("memory_mib", 0);
    DYNO_CHECK(PlanError, mib >= 0 && mib <= 1 << 30, "[placement] memory_mib is ", mib, "; expected 1 to ", 1 << 30);
    device.memory_bytes = static_cast<size_t>(mib * (1 << 20));
    device.streams = r.flag("streams", false);
    r.finish();
    devices.push_back(device);
  }
  return devices;
}

size_t read_bytes(SettingsReader& r, const char* name) {
  const int64_t bytes = r.integer(name, 0);
  DYNO_CHECK(PlanError, bytes >= 0, "[placement] ", name, " is ", bytes, "; expected bytes, 0 or more");
  return static_cast<size_t>(bytes);
}

}  // namespace

std::vector<plan::NamedRates> read_rates(const nb::dict& dict) {
  std::vector<plan::NamedRates> rates;
  for (const auto& [name, given] : dict) {
    nb::dict one;
    DYNO_CHECK(ProfileError, nb::try_cast(given, one), "[settings] the rates of ", nb::cast<std::string>(nb::str(name)),
               " are not a dict");
    SettingsReader r(one, "rate");
    plan::NamedRates named{.device = nb::cast<std::string>(nb::str(name)), .rates = {}};
    named.rates.bytes_per_second = r.number("memory_gbps", 0) * 1e9;
    named.rates.weight_bytes_per_second = r.number("weights_gbps", 0) * 1e9;
    named.rates.core_bytes_per_second = r.number("core_gbps", 0) * 1e9;
    named.rates.flops_one = r.number("gflops_one", 0) * 1e9;
    named.rates.flops_many = r.number("gflops_many", 0) * 1e9;
    named.rates.launch_seconds = r.number("launch_us", 0) * 1e-6;
    named.rates.spread_seconds = r.number("spread_us", 0) * 1e-6;
    named.rates.expert_seconds = r.number("experts_us", 0) * 1e-6;
    named.rates.link.bytes_per_second = r.number("link_gbps", 0) * 1e9;
    named.rates.link.latency_seconds = r.number("latency_us", 0) * 1e-6;
    r.finish();
    rates.push_back(std::move(named));
  }
  return rates;
}

plan::PlacementOptions read_placement(const nb::dict& dict, plan::PlacementOptions placement) {
  nb::dict rest;
  nb::dict rates;
  for (const auto& [key, value] : dict) {
    const auto name = nb::cast<std::string>(nb::str(key));
    if (name == "rates") {
      DYNO_CHECK(ProfileError, nb::try_cast(value, rates),
                 "[settings] placement setting rates is not a dict by device");
    } else if (name != "virtual_devices" && name != "beside_gpu" && name != "shares" && name != "expert_uses") {
      rest[key] = value;
    }
  }
  SettingsReader r(rest, "placement");
  placement.virtual_devices = read_virtual_devices(dict);
  if (dict.contains("rules")) placement.rules = r.texts("rules");
  placement.cpu_moe = r.flag("cpu_moe", placement.cpu_moe);
  placement.n_cpu_moe = r.integer("n_cpu_moe", placement.n_cpu_moe);
  if (dict.contains("n_gpu_layers")) placement.n_gpu_layers = r.integer("n_gpu_layers", 0);
  if (dict.contains("beside_gpu")) {
    int gpus = 0;  // in addition to the main one
    for (const nb::handle one : nb::cast<nb::list>(dict["beside_gpu"])) {
      DeviceInfo& device = placement.beside_gpu.emplace_back(device_from_dict(nb::cast<nb::dict>(one)));
      if (device.kind == DeviceKind::cuda) device.ordinal = ++gpus;
    }
  }
  placement.automatic = r.flag("automatic", false);
  placement.choose_cache = r.flag("choose_cache", false);
  placement.main_memory = read_bytes(r, "main_memory");
  placement.host_memory = read_bytes(r, "host_memory");
  placement.split_layers = r.flag("split_layers", false);
  if (dict.contains("shares")) {
    DYNO_CHECK(ProfileError, nb::try_cast(nb::borrow(dict["shares"]), placement.shares),
               "[settings] placement setting shares is not a list of numbers");
  }
  placement.rates = read_rates(rates);
  r.finish();
  const bool placed = placement.split_layers || !placement.rules.empty() || placement.cpu_moe ||
                      placement.n_cpu_moe != 0 || placement.n_gpu_layers;
  DYNO_CHECK(PlanError, !placement.automatic || !placed,
             "[placement] automatic=True lets the engine choose the placement; leave out the other placement settings");
  return placement;
}

std::vector<std::vector<int64_t>> read_expert_uses(const nb::dict& dict) {
  std::vector<std::vector<int64_t>> uses;
  if (!dict.contains("expert_uses")) return uses;
  DYNO_CHECK(ProfileError, nb::try_cast(nb::borrow(dict["expert_uses"]), uses),
             "[settings] placement setting expert_uses is not a list of lists of whole numbers");
  for (const std::vector<int64_t>& layer : uses) {
    for (const int64_t use : layer) {
      DYNO_CHECK(PlanError, use >= 0, "[experts] a recorded count is ", use, "; expected 0 or more");
    }
  }
  return uses;
}

nb::dict cost_dict(const plan::Plan& plan, const plan::PlanCost& cost) {
  nb::list parts;
  for (const plan::CostPart& part : cost.parts) {
    nb::dict d;
    d["device"] = device_name(plan.device(part.device));
    d["layer"] = part.layer < 0 ? nb::none() : nb::cast(part.layer);
    d["launches"] = part.launches;
    d["weights_bytes"] = part.weight_bytes;
    d["bytes"] = part.bytes;
    d["flops"] = part.flops;
    d["seconds"] = part.seconds;
    d["transfer_bytes"] = part.transfer_bytes;
    d["transfer_seconds"] = part.transfer_seconds;
    parts.append(d);
  }
  nb::dict out;
  out["seconds"] = cost.seconds;
  out["parts"] = parts;
  return out;
}

}  // namespace dyno
