// The engine's part of a profile: plain structs. YAML, schema and matching are implemented in Python (dyno.profiles).
#pragma once

#include <string>
#include <vector>

#include "ops/registry.h"

namespace dyno::profile {

// One `kernels:` entry: the configuration of an op for a range of token counts.
struct KernelEntry {
  std::string op_key;
  std::string tokens;    // the range as written in the profile
  int first_bucket = 0;  // inclusive, see ops::bucket_of
  int last_bucket = 0;
  std::vector<ops::ConfigEntry> config;
  std::string origin;  // "FILE: kernels.<op_key>.<range>", printed in every message about the entry
};

}  // namespace dyno::profile
