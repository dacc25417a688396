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

// Whether this binary holds code for the device: always on a CPU that it runs on; on a GPU when its architectures were
// built, or older ones that the driver can compile or run there.
bool compiled_for(const DeviceInfo& device);
// The rule for GPUs. `architectures` as CMake writes them, with commas: "75,90a". Code of an architecture runs on its
// own chips and on later ones of the same generation; intermediate code (no suffix, or -virtual) on all later ones.
bool cuda_code_for(std::string_view architectures, int compute_capability);

// The instances that supports(desc, …, device) accepts, in the order of variants.def. Every instance is compiled in, so
// the sets differ only for devices that this binary holds no code for.
template <typename Desc>
std::vector<Config> supported_instances(std::span<const Config> instances, const Desc& desc, const DeviceInfo& device,
                                        CandidateSet set) {
  std::vector<Config> out;
  if (set == CandidateSet::compiled && !compiled_for(device)) return out;
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
