#include "ops/registry.h"

#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "ops/contract.h"
#include "ops/launch.h"
#include "ops/neighbours.h"

namespace dyno::ops {
namespace {

#define DYNO_OP_FAMILY(name, Stem, launches)                                                               \
  static_assert(kLaunches<Stem##Desc, CpuContext> == HasLaunch<Stem##Desc, Stem##Args, CpuContext> &&      \
                    kLaunches<Stem##Desc, CudaStream> == HasLaunch<Stem##Desc, Stem##Args, CudaStream>,    \
                "ops/families.def: " #name " launches " #launches ", its header declares something else"); \
  static_assert(std::is_same_v<std::variant_alternative_t<static_cast<size_t>(Family::name), OpDesc>, Stem##Desc>);
#include "ops/families.def"

std::vector<std::string_view> variant_names(Family family) {
  std::vector<std::string_view> names;
  for (const VariantInfo& variant : variants(family)) names.push_back(variant.name);
  return names;
}

int variant_index(Family family, std::string_view name) {
  const std::vector<std::string_view> names = variant_names(family);
  const auto it = std::find(names.begin(), names.end(), name);
  DYNO_CHECK(ProfileError, it != names.end(), "[kernels] ", family_name(family), " has no variant '", name, "'",
             suggestion(name, names));
  return static_cast<int>(it - names.begin());
}

// Whether this binary has the instance. If it has no code for the device at all, answers for a build that does, so that
// profiles can be checked and models planned on other machines.
Support in_this_build(const OpDesc& desc, const Config& config, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cpu || !compiled_for(device)) return Support::yes();
  for (const DType type : std::visit([](const auto& d) { return weight_types(d); }, desc)) {
    if (Support built = type_built(type, device); !built) return built;
  }
  const std::string_view variant = variants(family_of(desc))[config.variant].name;
  const uint32_t groups = std::visit([&](const auto& d) { return groups_of(d, variant); }, desc);
  if (Support built = groups_built(groups, device); !built) return built;
  const bool held =
      std::visit([&](const auto& d) { return holds_instance(d, variants(family_of(desc)), config); }, desc);
  if (held) return Support::yes();
  return Support::no(str_cat(describe(family_of(desc), config), " is not in this build. To keep it, name it in the ",
                             "GGML_CUDA_PROFILE, or build with GGML_CUDA_INSTANCES=all for more chips than 90a"));
}

}  // namespace

Family family_of(const OpDesc& desc) { return static_cast<Family>(desc.index()); }

int64_t tokens_of(const OpDesc& desc) {
  return std::visit([](const auto& d) { return d.m; }, desc);
}

OpDesc with_tokens(OpDesc desc, int64_t m) {
  std::visit([m](auto& d) { d.m = m; }, desc);
  return desc;
}

OpDesc with_path(OpDesc desc, ProductPath path, ComputeType compute) {
  std::visit(
      [&](auto& d) {
        if constexpr (requires { d.path; }) d.path = path, d.compute = compute;
      },
      desc);
  return desc;
}

int64_t tile_height(const OpDesc& reader, const Config& config) {
  const VariantInfo& variant = variants(family_of(reader))[config.variant];
  for (size_t p = 0; p < kMaxParams; ++p) {
    if (variant.param_names[p] == "tokens") return config.params[p];
  }
  return 0;
}

bool set_tiles(OpDesc& giver, OpDesc& reader, int64_t height) {
  auto* reads = std::get_if<MatmulDesc>(&reader);
  if (reads == nullptr) return false;
  if (auto* up_gate = std::get_if<UpGateDesc>(&giver); up_gate != nullptr && up_gate->n == reads->k) {
    up_gate->y_tiles = reads->x_tiles = height;
    return true;
  }
  if (auto* heads = std::get_if<AttentionDesc>(&giver); heads != nullptr && heads->heads * heads->dv == reads->k) {
    heads->out_tiles = reads->x_tiles = height;
    return true;
  }
  return false;
}

std::vector<Config> candidates(const OpDesc& desc, const DeviceInfo& device, CandidateSet set) {
  return std::visit([&](const auto& d) { return candidates(d, device, set); }, desc);
}

Config default_config(const OpDesc& desc, const DeviceInfo& device) {
  return default_config(desc, device, Neighbours{});
}

Config default_config(const OpDesc& desc, const DeviceInfo& device, const Neighbours& neighbours) {
  const auto of_family = [&](const auto& d) {
    if constexpr (std::is_same_v<std::decay_t<decltype(d)>, MatmulDesc>) {
      return default_config(d, device, neighbours);
    } else {
      return default_config(d, device);
    }
  };
  const Config wanted = std::visit(of_family, desc);
  if (in_this_build(desc, wanted, device)) return wanted;
  // No default is optional (tests/ops). If one is missing anyway, the first candidate of its variant replaces it.
  const std::vector<Config> held = candidates(desc, device, CandidateSet::compiled);
  const auto same = [&](const Config& config) { return config.variant == wanted.variant; };
  const auto nearest = std::find_if(held.begin(), held.end(), same);
  if (nearest != held.end()) return *nearest;
  return held.empty() ? wanted : held.front();
}

Support supports(const OpDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support legal = std::visit([&](const auto& d) { return supports(d, config, device); }, desc);
  return legal ? in_this_build(desc, config, device) : legal;
}

Support kernels_built(const OpDesc& desc, const DeviceInfo& device) {
  return groups_built(std::visit([](const auto& d) { return groups_of(d); }, desc), device);
}

Cost cost(const OpDesc& desc) {
  return std::visit([](const auto& d) { return cost(d); }, desc);
}

size_t scratch_bytes(const OpDesc& desc, const Config& config) {
  return std::visit([&](const auto& d) { return scratch_bytes(d, config); }, desc);
}

std::span<const VariantInfo> variants(Family family) {
  switch (family) {
#define DYNO_OP_FAMILY(name, ...) \
  case Family::name:              \
    return name##_variants();
#include "ops/families.def"
  }
  throw ProfileError(str_cat("[ops] no op family has the number ", static_cast<int>(family)));
}

std::vector<ConfigEntry> config_entries(Family family, const Config& config) {
  const std::span<const VariantInfo> all = variants(family);
  DYNO_CHECK(ProfileError, config.variant < all.size(), "[kernels] ", family_name(family), " has no variant number ",
             static_cast<int>(config.variant));
  const VariantInfo& variant = all[config.variant];
  std::vector<ConfigEntry> entries = {{"variant", std::string(variant.name), 0}};
  for (size_t p = 0; p < kMaxParams && !variant.param_names[p].empty(); ++p) {
    entries.push_back({std::string(variant.param_names[p]), {}, config.params[p]});
  }
  return entries;
}

Config config_from_entries(Family family, std::span<const ConfigEntry> entries) {
  const auto named = std::find_if(entries.begin(), entries.end(), [](const auto& e) { return e.key == "variant"; });
  DYNO_CHECK(ProfileError, named != entries.end(), "[kernels] a configuration of ", family_name(family),
             " needs the key 'variant': one of ", join(variant_names(family), ", "));
  Config config;
  config.variant = static_cast<uint8_t>(variant_index(family, named->text));
  const VariantInfo& variant = variants(family)[config.variant];
  std::vector<std::string_view> names = {"variant"};
  for (const std::string_view name : variant.param_names) {
    if (!name.empty()) names.push_back(name);
  }
  std::array<bool, kMaxParams> given{};
  for (const ConfigEntry& entry : entries) {
    if (&entry == &*named) continue;
    const auto it = std::find(names.begin(), names.end(), std::string_view(entry.key));
    DYNO_CHECK(ProfileError, it != names.end(), "[kernels] variant ", variant.name, " of ", family_name(family),
               " has no parameter '", entry.key, "'", suggestion(entry.key, names));
    const size_t p = static_cast<size_t>(it - names.begin()) - 1;
    DYNO_CHECK(ProfileError, it != names.begin() && !given[p], "[kernels] '", entry.key, "' is given twice");
    DYNO_CHECK(ProfileError, entry.text.empty(), "[kernels] ", entry.key, "='", entry.text, "' is not a whole number");
    DYNO_CHECK(ProfileError, entry.value >= 0 && entry.value <= std::numeric_limits<int16_t>::max(), "[kernels] ",
               entry.key, "=", entry.value, " is not in 0..", std::numeric_limits<int16_t>::max());
    config.params[p] = static_cast<int16_t>(entry.value);
    given[p] = true;
  }
  for (size_t p = 0; p < kMaxParams && !variant.param_names[p].empty(); ++p) {
    DYNO_CHECK(ProfileError, given[p], "[kernels] variant ", variant.name, " of ", family_name(family),
               " needs the parameter '", variant.param_names[p], "'");
  }
  return config;
}

std::string describe(Family family, const Config& config) {
  std::string out;
  for (const ConfigEntry& entry : config_entries(family, config)) {
    if (entry.key == "variant") {
      out = entry.text;
    } else {
      out += str_cat(" ", entry.key, "=", entry.value);
    }
  }
  return out;
}

}  // namespace dyno::ops
