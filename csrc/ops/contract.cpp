#include "ops/contract.h"

#include "core/error.h"
#include "core/text.h"

namespace dyno::ops {

Support check_config(Family family, std::span<const VariantInfo> variants, std::span<const Config> instances,
                     const Config& config, const DeviceInfo& device) {
  if (config.variant >= variants.size()) {
    return Support::no(
        str_cat("variant number ", static_cast<int>(config.variant), " does not exist in ", family_name(family)));
  }
  const VariantInfo& variant = variants[config.variant];
  if (variant.device != device.kind) {
    return Support::no(str_cat("variant ", variant.name, " runs on ",
                               variant.device == DeviceKind::cpu ? "cpu" : "cuda", ", the device is ",
                               device.kind == DeviceKind::cpu ? "cpu" : "cuda"));
  }
  if (device.kind == DeviceKind::cpu && device.isa < variant.min_isa) {
    return Support::no(str_cat("variant ", variant.name, " needs ", cpu_isa_name(variant.min_isa), ", the device has ",
                               cpu_isa_name(device.isa)));
  }
  if (std::find(instances.begin(), instances.end(), config) != instances.end()) return Support::yes();
  // Name the first parameter whose value no instance of the variant has; else it is the combination.
  for (int p = 0; p < kMaxParams; ++p) {
    const auto at = static_cast<size_t>(p);
    const auto same = [&](const Config& c) { return c.variant == config.variant && c.params[at] == config.params[at]; };
    if (std::any_of(instances.begin(), instances.end(), same)) continue;
    std::vector<int> values;
    for (const Config& c : instances) {
      if (c.variant == config.variant) values.push_back(c.params[at]);
    }
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    std::string list;
    for (const int value : values) list += str_cat(list.empty() ? "" : ", ", value);
    const std::string_view name = variant.param_names[at].empty() ? "an unnamed parameter" : variant.param_names[at];
    return Support::no(
        str_cat(name, "=", config.params[at], " is no instance of variant ", variant.name, "; compiled: ", list));
  }
  return Support::no(str_cat("no instance of variant ", variant.name, " has this combination of parameters"));
}

Support check_sizes(std::initializer_list<Size> sizes) {
  for (const Size& size : sizes) {
    if (size.value < 1) return Support::no(str_cat(size.name, "=", size.value, " is below 1"));
  }
  return Support::yes();
}

}  // namespace dyno::ops
