// Values of the op contract as Python dicts and back: Desc, Config, DeviceInfo. Shared by the ops bindings.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "ops/registry.h"

namespace dyno {

// {field: value} with the fields of the C++ struct, enumerations by name. Fields left out keep their default; an
// unknown one throws ProfileError with the nearest name.
ops::OpDesc desc_from_dict(ops::Family family, const nanobind::dict& dict);
nanobind::dict desc_to_dict(const ops::OpDesc& desc);

// {"variant": name, parameter: value, …}; as entries while the family is not known yet.
std::vector<ops::ConfigEntry> config_entries_from_dict(const nanobind::dict& dict);
ops::Config config_from_dict(ops::Family family, const nanobind::dict& dict);
nanobind::dict config_to_dict(ops::Family family, const ops::Config& config);

// The device that `dyno._core.cpu_info()` describes; absent fields keep the defaults of DeviceInfo. None: this machine.
DeviceInfo device_from_dict(const std::optional<nanobind::dict>& dict);

}  // namespace dyno
