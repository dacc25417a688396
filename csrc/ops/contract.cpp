#include "ops/contract.h"

#include <charconv>

#include "core/error.h"
#include "core/text.h"
#include "ops/compiled_chips.h"

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
  // Names the first parameter whose value no instance of the variant has; otherwise the combination is at fault.
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
        str_cat(name, "=", config.params[at], " is not an instance of variant ", variant.name, "; compiled: ", list));
  }
  return Support::no(str_cat("no instance of variant ", variant.name, " has this combination of parameters"));
}

bool compiled_for(const DeviceInfo& device) {
  if (device.kind == DeviceKind::cpu) return true;
#ifdef DYNO_HAVE_CUDA
  return cuda_code_for(DYNO_CUDA_ARCHITECTURES, device.compute_capability);
#else
  return false;
#endif
}

bool cuda_code_for(std::string_view architectures, int compute_capability) {
  while (!architectures.empty()) {
    const size_t comma = std::min(architectures.find(','), architectures.size());
    std::string_view arch = architectures.substr(0, comma);
    architectures.remove_prefix(std::min(comma + 1, architectures.size()));
    int number = 0;
    const char* stop = std::from_chars(arch.data(), arch.data() + arch.size(), number).ptr;
    arch.remove_prefix(static_cast<size_t>(stop - arch.data()));
    if (number == compute_capability) return true;
    if (arch.starts_with('a')) continue;  // this chip only
    const bool same_family = number / 10 == compute_capability / 10 && number < compute_capability;
    if (same_family && (arch.starts_with('f') || !arch.ends_with("-virtual"))) return true;
    if (!arch.starts_with('f') && !arch.ends_with("-real") && number < compute_capability) return true;
  }
  return false;
}

Support clusters_supported(const DeviceInfo& device) {
  for (std::string_view rest = kCompiledArchitectures; !rest.empty();) {
    const std::string_view arch = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(arch.size() + 1, rest.size()));
    int number = 0;
    std::from_chars(arch.data(), arch.data() + arch.size(), number);
    if (number >= 90 && cuda_code_for(arch, device.compute_capability)) return Support::yes();
  }
  return Support::no(str_cat("clusters of blocks need code for compute capability 9.0 or later; the device has ",
                             device.compute_capability, ", the build has ", kCompiledArchitectures));
}

Support fits_shared(size_t bytes, const DeviceInfo& device) {
  if (bytes <= static_cast<size_t>(device.shared_per_block_bytes)) return Support::yes();
  return Support::no(
      str_cat(bytes, " bytes of shared memory are more than the device's ", device.shared_per_block_bytes));
}

std::vector<std::string_view> types_compiled() {
  std::vector<std::string_view> all;
#define DYNO_LISTED(name) \
  if (type_compiled(DType::name)) all.push_back(#name);
#define DYNO_FLOAT_TYPE(name, ...) DYNO_LISTED(name)
#define DYNO_QUANT_TYPE(name, ...) DYNO_LISTED(name)
#define DYNO_GPU_TYPE(name, ...) DYNO_LISTED(name)
#include "core/weight_types.def"
#undef DYNO_LISTED
  return all;
}

Support type_built(DType type, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cpu || !compiled_for(device) || type_compiled(type)) return Support::yes();
  return Support::no(str_cat("this build has no GPU kernels for weights of type ", dtype_name(type),
                             ": GGML_CUDA_PROFILE=", kBuiltFor, " left all but ", join(types_compiled(), ", "),
                             " out. Build without GGML_CUDA_PROFILE, or with a profile of this model"));
}

namespace {

struct GroupInfo {
  KernelGroup group;
  std::string_view name, words;
};
constexpr GroupInfo kGroups[] = {
#define DYNO_KERNEL_GROUP(name, words) {KernelGroup::name, #name, words},
#include "ops/kernel_groups.def"
};

// The words for the groups among `bits`.
std::string words_of(uint32_t bits) {
  std::vector<std::string_view> words;
  for (const GroupInfo& info : kGroups) {
    if ((bits & group_bit(info.group)) != 0) words.push_back(info.words);
  }
  return words.empty() ? "none" : join(words, ", ");
}

std::string missing(uint32_t bits) {
  return str_cat("this build has no GPU kernels for ", words_of(bits), ": GGML_CUDA_PROFILE=", kGroupsFor,
                 " left such groups out, and kept ", words_of(kGroupsBuilt),
                 ". Build without GGML_CUDA_PROFILE, or with a profile of this model");
}

}  // namespace

std::vector<std::string_view> groups_compiled() {
  std::vector<std::string_view> all;
  for (const GroupInfo& info : kGroups) {
    if (group_built(info.group)) all.push_back(info.name);
  }
  return all;
}

Support groups_built(uint32_t groups, const DeviceInfo& device) {
  const uint32_t left_out = groups & ~kGroupsBuilt;
  if (device.kind == DeviceKind::cpu || !compiled_for(device) || left_out == 0) return Support::yes();
  return Support::no(missing(left_out));
}

void throw_left_out(KernelGroup group) { throw UnsupportedError(str_cat("[ops] ", missing(group_bit(group)))); }

void throw_left_out(std::string_view variant, DType type, const Params& params) {
  throw UnsupportedError(str_cat("[ops] ", variant, " ", params[0], " ", params[1], " for ", dtype_name(type),
                                 " is not in this build (GGML_CUDA_INSTANCES, GGML_CUDA_PROFILE)"));
}

Support check_sizes(std::initializer_list<Size> sizes) {
  for (const Size& size : sizes) {
    if (size.value < 1) return Support::no(str_cat(size.name, "=", size.value, " is below 1"));
  }
  return Support::yes();
}

}  // namespace dyno::ops
