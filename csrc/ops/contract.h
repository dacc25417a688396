// What every family's host code shares: the tables made from its variants.def and the checks that read them.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "ops/op.h"

namespace dyno::ops {

// Everything of supports() that needs no Desc: the device has such kernels, the variant exists, the parameters are one
// of the instances of variants.def. The reason names the value and what would be valid.
Support check_config(Family family, std::span<const VariantInfo> variants, std::span<const Config> instances,
                     const Config& config, const DeviceInfo& device);

// The instances that supports(desc, …, device) accepts, in the order of variants.def. On the CPU every instance is
// compiled in, so both candidate sets are the same.
template <typename Desc>
std::vector<Config> supported_instances(std::span<const Config> instances, const Desc& desc, const DeviceInfo& device) {
  std::vector<Config> out;
  std::copy_if(instances.begin(), instances.end(), std::back_inserter(out),
               [&](const Config& config) { return supports(desc, config, device).ok; });
  return out;
}

// At least 1 for each named size, else a refusal that names it.
struct Size {
  std::string_view name;
  int64_t value;
};
Support check_sizes(std::initializer_list<Size> sizes);

}  // namespace dyno::ops
