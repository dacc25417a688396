#include "ops/registry.h"

#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "ops/attention/attention.h"
#include "ops/contract.h"
#include "ops/copy/copy.h"
#include "ops/embed/embed.h"
#include "ops/glu/glu.h"
#include "ops/kv_store/kv_store.h"
#include "ops/matmul/matmul.h"
#include "ops/matmul_id/matmul_id.h"
#include "ops/mla_expand/mla_expand.h"
#include "ops/moe_down_sum/moe_down_sum.h"
#include "ops/moe_route/moe_route.h"
#include "ops/moe_sum/moe_sum.h"
#include "ops/moe_up_gate/moe_up_gate.h"
#include "ops/norm/norm.h"
#include "ops/norm_route/norm_route.h"
#include "ops/qkv/qkv.h"
#include "ops/qkv_rope_store/qkv_rope_store.h"
#include "ops/rope/rope.h"
#include "ops/rope_attention/rope_attention.h"
#include "ops/sample/sample.h"
#include "ops/up_gate/up_gate.h"

namespace dyno::ops {
namespace {

constexpr Family kFamilyOf[] = {
    Family::embed,        Family::norm,        Family::rope,           Family::matmul,     Family::matmul_id,
    Family::up_gate,      Family::moe_up_gate, Family::moe_route,      Family::moe_sum,    Family::attention,
    Family::kv_store,     Family::copy,        Family::sample,         Family::glu,        Family::qkv,
    Family::moe_down_sum, Family::mla_expand,  Family::qkv_rope_store, Family::norm_route, Family::rope_attention,
};
static_assert(std::size(kFamilyOf) == std::variant_size_v<OpDesc>, "one family for each alternative of OpDesc");

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

// Whether this binary holds the instance. Without any code for the device the question is what a build that has some
// would do, so that profiles can be checked and models planned elsewhere.
Support in_this_build(const OpDesc& desc, const Config& config, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cpu || !compiled_for(device)) return Support::yes();
  const bool held =
      std::visit([&](const auto& d) { return holds_instance(d, variants(family_of(desc)), config); }, desc);
  if (held) return Support::yes();
  return Support::no(str_cat(describe(family_of(desc), config), " is not in this build, which left optional instances ",
                             "out; build with GGML_CUDA_INSTANCES=all, or name it in the GGML_CUDA_PROFILE"));
}

}  // namespace

Family family_of(const OpDesc& desc) { return kFamilyOf[desc.index()]; }

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

std::vector<Config> candidates(const OpDesc& desc, const DeviceInfo& device, CandidateSet set) {
  return std::visit([&](const auto& d) { return candidates(d, device, set); }, desc);
}

Config default_config(const OpDesc& desc, const DeviceInfo& device) {
  const Config wanted = std::visit([&](const auto& d) { return default_config(d, device); }, desc);
  if (in_this_build(desc, wanted, device)) return wanted;
  // No default is optional (tests/ops); should one be all the same, its variant's first candidate takes the place.
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

Cost cost(const OpDesc& desc) {
  return std::visit([](const auto& d) { return cost(d); }, desc);
}

size_t scratch_bytes(const OpDesc& desc, const Config& config) {
  return std::visit([&](const auto& d) { return scratch_bytes(d, config); }, desc);
}

std::span<const VariantInfo> variants(Family family) {
  switch (family) {
    case Family::embed:
      return embed_variants();
    case Family::norm:
      return norm_variants();
    case Family::rope:
      return rope_variants();
    case Family::moe_route:
      return moe_route_variants();
    case Family::moe_sum:
      return moe_sum_variants();
    case Family::attention:
      return attention_variants();
    case Family::kv_store:
      return kv_store_variants();
    case Family::sample:
      return sample_variants();
    case Family::matmul:
      return matmul_variants();
    case Family::matmul_id:
      return matmul_id_variants();
    case Family::up_gate:
      return up_gate_variants();
    case Family::moe_up_gate:
      return moe_up_gate_variants();
    case Family::copy:
      return copy_variants();
    case Family::glu:
      return glu_variants();
    case Family::qkv:
      return qkv_variants();
    case Family::moe_down_sum:
      return moe_down_sum_variants();
    case Family::mla_expand:
      return mla_expand_variants();
    case Family::qkv_rope_store:
      return qkv_rope_store_variants();
    case Family::norm_route:
      return norm_route_variants();
    case Family::rope_attention:
      return rope_attention_variants();
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
