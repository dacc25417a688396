// Reads the settings of a session and the kernels of a profile from Python values.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "bindings/py_session.h"
#include "plan/plan.h"
#include "profile/profile.h"
#include "runtime/session.h"

namespace dyno {

// `described`: a device that need not exist, for plans. `asked`: receives the default of each known name. All of these
// throw ProfileError for an unknown name or a value that cannot be read.
plan::LoadOptions read_load(const nanobind::dict& dict, const std::optional<nanobind::dict>& described,
                            DeviceInfo& device, nanobind::dict* asked = nullptr);
plan::ContextOptions read_context(const nanobind::dict& dict, nanobind::dict* asked = nullptr);
runtime::SessionSettings read_session(const nanobind::dict& dict, runtime::SessionSettings s,
                                      nanobind::dict* asked = nullptr);

// {kind: {name: default}} of all settings that these readers know.
nanobind::dict known_settings();

// (op_key, tokens, config, origin). A malformed range is an error of the caller, not of the profile.
std::vector<profile::KernelEntry> read_kernels(const Kernels& kernels);

}  // namespace dyno
