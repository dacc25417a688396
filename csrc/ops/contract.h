// Host code that all families share: tables generated from variants.def, and the checks that use them.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/fields.h"
#include "ops/instances.h"
#include "ops/kernel_groups.h"
#include "ops/op.h"

namespace dyno::ops {

// The part of supports() that needs no Desc: the device has kernels of the variant's kind, the variant exists, and the
// parameters are an instance in variants.def. The reason has the offending value and valid ones.
Support check_config(Family family, std::span<const VariantInfo> variants, std::span<const Config> instances,
                     const Config& config, const DeviceInfo& device);

// Whether this binary has code for the device. On a CPU always; on a GPU if its architecture was built, or an older one
// that runs there directly or after compilation by the driver.
bool compiled_for(const DeviceInfo& device);
// The rule for GPUs. `architectures` is CMake's list with commas: "75,90a". Code for an architecture runs on its own
// chips and on later ones of the same generation; intermediate code (no suffix, or -virtual) runs on all later ones.
bool cuda_code_for(std::string_view architectures, int compute_capability);

// Clusters of blocks need compute capability 9.0 or later, and code for it. A build without CUDA answers as a build
// with code for 90a.
Support clusters_supported(const DeviceInfo& device);
// Whether a block can have so much shared memory.
Support fits_shared(size_t bytes, const DeviceInfo& device);

// Whether this binary has kernels for weights of this type. If it has no code for the device at all, answers for a
// build that does. The reason names the profile of a GGML_CUDA_PROFILE that left them out.
Support type_built(DType type, const DeviceInfo& device);
// The same for groups of kernels, of which `groups` has the bits.
Support groups_built(uint32_t groups, const DeviceInfo& device);

// The types of the weights that an op reads; for an op without weights of several types f32, which every build
// supports.
template <typename Desc>
std::array<DType, 3> weight_types(const Desc& desc) {
  if constexpr (requires { desc.type_v; }) {
    return {desc.type, desc.type_k, desc.n_v > 0 ? desc.type_v : desc.type};
  } else if constexpr (std::is_same_v<Desc, MlaExpandDesc>) {
    return {desc.k_type, desc.v_type, desc.v_type};
  } else if constexpr (requires { desc.type; } && !std::is_same_v<Desc, KvStoreDesc>) {
    return {desc.type, desc.type, desc.type};
  } else {
    return {DType::f32, DType::f32, DType::f32};
  }
}

// Whether this binary has the kernels of a GPU instance, for the weight types of the desc.
template <typename Desc>
bool holds_instance(const Desc& desc, std::span<const VariantInfo> variants, const Config& config) {
  const VariantInfo& variant = variants[config.variant];
  if (variant.device == DeviceKind::cpu) return true;
  for (const DType type : weight_types(desc)) {
    if (!type_compiled(type)) return false;
  }
  if ((groups_of(desc, variant.name) & ~kGroupsBuilt) != 0) return false;
  uint64_t bit = kNoTypeBit;
  if constexpr (requires { desc.type; }) bit = type_bit(desc.type);
  return instance_compiled(variant.name, bit, config.params);
}

// The instances that supports(desc, …, device) accepts, in the order of variants.def; with `compiled`, only instances
// that this binary has.
template <typename Desc>
std::vector<Config> supported_instances(std::span<const VariantInfo> variants, std::span<const Config> instances,
                                        const Desc& desc, const DeviceInfo& device, CandidateSet set) {
  std::vector<Config> out;
  const bool compiled = set == CandidateSet::compiled;
  if (compiled && !compiled_for(device)) return out;
  std::copy_if(instances.begin(), instances.end(), std::back_inserter(out), [&](const Config& config) {
    return supports(desc, config, device).ok && (!compiled || holds_instance(desc, variants, config));
  });
  return out;
}

// Checks that each named size is at least 1. The reason names the first one that is not.
struct Size {
  std::string_view name;
  int64_t value;
};
Support check_sizes(std::initializer_list<Size> sizes);

}  // namespace dyno::ops
