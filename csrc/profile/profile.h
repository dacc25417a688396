// The parts of a profile that the engine needs: plain structs. YAML, schema and matching live in Python
// (dyno.profiles).
#pragma once

#include <string>
#include <vector>

#include "ops/registry.h"

namespace dyno::profile {

// One `kernels:` entry: the configuration of an op for a range of token counts.
struct KernelEntry {
  std::string op_key;
  std::string tokens;    // the range as the profile spells it
  int first_bucket = 0;  // inclusive, see ops::bucket_of
  int last_bucket = 0;
  std::vector<ops::ConfigEntry> config;
  std::string origin;  // "FILE: kernels.<op_key>.<range>", printed wherever the entry is named
};

}  // namespace dyno::profile
