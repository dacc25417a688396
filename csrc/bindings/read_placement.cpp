#include "bindings/read_placement.h"

#include <nanobind/stl/optional.h>
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
             "[settings] placement setting virtual_devices is no list of dicts");
  for (const nb::dict& one : given) {
    SettingsReader r(one, "virtual device");
    plan::VirtualDevice device;
    device.link.bytes_per_second = r.number("link_gbps", 0) * 1e9;
    device.link.latency_seconds = r.number("latency_us", 0) * 1e-6;
    const int64_t mib = r.integer("memory_mib", 0);
    DYNO_CHECK(PlanError, mib >= 0 && mib <= (int64_t{1} << 30), "[placement] memory_mib is ", mib, "; expected 1 to ",
               int64_t{1} << 30);
    device.memory_bytes = static_cast<size_t>(mib) << 20;
    r.finish();
    devices.push_back(device);
  }
  return devices;
}

}  // namespace

plan::PlacementOptions read_placement(const nb::dict& dict) {
  nb::dict rest;
  for (const auto& [key, value] : dict) {
    const auto name = nb::cast<std::string>(nb::str(key));
    if (name != "virtual_devices" && name != "beside_gpu") rest[key] = value;
  }
  SettingsReader r(rest, "placement");
  plan::PlacementOptions placement;
  placement.virtual_devices = read_virtual_devices(dict);
  placement.rules = r.texts("rules");
  placement.cpu_moe = r.flag("cpu_moe", false);
  placement.n_cpu_moe = r.integer("n_cpu_moe", 0);
  if (dict.contains("n_gpu_layers")) placement.n_gpu_layers = r.integer("n_gpu_layers", 0);
  if (dict.contains("beside_gpu")) {
    int gpus = 0;  // besides the main one
    for (const nb::handle one : nb::cast<nb::list>(dict["beside_gpu"])) {
      DeviceInfo& device = placement.beside_gpu.emplace_back(device_from_dict(nb::cast<nb::dict>(one)));
      if (device.kind == DeviceKind::cuda) device.ordinal = ++gpus;
    }
  }
  r.finish();
  return placement;
}

}  // namespace dyno
