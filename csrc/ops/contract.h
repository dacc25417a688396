// The common host code of all families: the tables made from its variants.def and the checks that read them.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "core/fields.h"
#include "ops/instances.h"
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

// Clusters of blocks need a chip from 9.0 on and code that was compiled for one. A build without CUDA answers for one
// that has code for 90a.
Support clusters_supported(const DeviceInfo& device);

// Whether kernels for weights of this type are in this binary; if it has no code for the device at all, in a build that
// has some. The reason names the profile of a GGML_CUDA_PROFILE that left them out.
Support type_built(DType type, const DeviceInfo& device);

// The types of the weights that an op reads; f32, which every build has, for an op without weights of several types.
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

// Whether the kernels of a GPU instance are in this binary, for the desc's weight types where it has some.
template <typename Desc>
bool holds_instance(const Desc& desc, std::span<const VariantInfo> variants, const Config& config) {
  const VariantInfo& variant = variants[config.variant];
  if (variant.device == DeviceKind::cpu) return true;
  for (const DType type : weight_types(desc)) {
    if (!type_compiled(type)) return false;
  }
  uint64_t bit = kNoTypeBit;
  if constexpr (requires { desc.type; }) bit = type_bit(desc.type);
  return instance_compiled(variant.name, bit, config.params);
}

// The instances that supports(desc, …, device) of the family accepts, in the order of variants.def; `compiled` leaves
// out what this binary holds no code for.
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

// At least 1 for each named size, else a refusal that names it.
struct Size {
  std::string_view name;
  int64_t value;
};
Support check_sizes(std::initializer_list<Size> sizes);

}  // namespace dyno::ops
