// Conversion of the op contract's values to and from Python dicts: Desc, Config, DeviceInfo. Shared by the ops
// bindings.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "ops/registry.h"

namespace dyno {

// {field: value} with the fields of the C++ struct and names for enumeration values. Missing fields keep their default.
// An unknown field throws ProfileError with the nearest name.
ops::OpDesc desc_from_dict(ops::Family family, const nanobind::dict& dict);
nanobind::dict desc_to_dict(const ops::OpDesc& desc);

// {"variant": name, parameter: value, …}; as entries, for use before the family is known.
std::vector<ops::ConfigEntry> config_entries_from_dict(const nanobind::dict& dict);
ops::Config config_from_dict(ops::Family family, const nanobind::dict& dict);
nanobind::dict config_to_dict(ops::Family family, const ops::Config& config);

// The device in the form of `dyno._core.cpu_info()`; missing fields keep the defaults of DeviceInfo. None: this
// machine.
DeviceInfo device_from_dict(const std::optional<nanobind::dict>& dict);

}  // namespace dyno
