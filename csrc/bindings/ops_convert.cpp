#include "bindings/ops_convert.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "ops/fields.h"
#include "ops/names.h"

namespace nb = nanobind;

namespace dyno {
namespace {

std::string python_type(nb::handle value) { return nb::cast<std::string>(value.type().attr("__name__")); }

std::string text_of(nb::handle value, std::string_view what) {
  DYNO_CHECK(ProfileError, nb::isinstance<nb::str>(value), "[ops] ", what, " is a ", python_type(value),
             "; expected a string");
  return nb::cast<std::string>(value);
}

int64_t integer_of(nb::handle value, std::string_view what) {
  // A Python bool is an int, but never a valid size.
  int64_t out = 0;
  DYNO_CHECK(ProfileError, !nb::isinstance<nb::bool_>(value) && nb::try_cast(value, out), "[ops] ", what, " is a ",
             python_type(value), "; expected a whole number of 64 bits");
  return out;
}

void assign(nb::handle value, std::string_view name, int64_t& out) { out = integer_of(value, name); }
void assign(nb::handle value, std::string_view name, bool& out) {
  DYNO_CHECK(ProfileError, nb::isinstance<nb::bool_>(value), "[ops] ", name, " is a ", python_type(value),
             "; expected True or False");
  out = nb::cast<bool>(value);
}
void assign(nb::handle value, std::string_view name, DType& out) {
  const std::string text = text_of(value, name);
  const std::optional<DType> type = dtype_from_name(text);
  DYNO_CHECK(ProfileError, type.has_value(), "[ops] ", name, " '", text,
             "' is not a tensor type; expected one such as f16 or q4_0");
  out = *type;
}
template <typename E>
  requires std::is_enum_v<E>
void assign(nb::handle value, std::string_view name, E& out) {
  const std::string text = text_of(value, name);
  const std::span<const std::string_view> names = ops::enum_names(out);
  const auto it = std::find(names.begin(), names.end(), text);
  DYNO_CHECK(ProfileError, it != names.end(), "[ops] unknown ", name, " '", text, "'", suggestion(text, names));
  out = static_cast<E>(it - names.begin());
}

nb::object to_object(int64_t value) { return nb::int_(value); }
nb::object to_object(bool value) { return nb::bool_(value); }
nb::object to_object(std::string_view value) { return nb::str(value.data(), value.size()); }
nb::object to_object(DType value) { return to_object(dtype_name(value)); }
template <typename E>
  requires std::is_enum_v<E>
nb::object to_object(E value) {
  return to_object(ops::enum_names(value)[static_cast<size_t>(value)]);
}

}  // namespace

ops::OpDesc desc_from_dict(ops::Family family, const nb::dict& dict) {
  ops::OpDesc desc = ops::default_desc(family);
  std::visit(
      [&]<typename D>(D& d) {
        std::vector<std::string_view> names;
        ops::for_each_field(std::type_identity<D>{},
                            [&](std::string_view name, auto, ops::In) { names.push_back(name); });
        for (const auto& [key, value] : dict) {
          const std::string text = text_of(key, "a field's name");
          DYNO_CHECK(ProfileError, std::find(names.begin(), names.end(), text) != names.end(), "[ops] ",
                     ops::family_name(family), " has no field '", text, "'", suggestion(text, names));
          // clang 14 cannot capture structured bindings by reference.
          ops::for_each_field(std::type_identity<D>{}, [&, value = value](std::string_view name, auto member, ops::In) {
            if (name == text) assign(value, name, d.*member);
          });
        }
      },
      desc);
  return desc;
}

nb::dict desc_to_dict(const ops::OpDesc& desc) {
  nb::dict dict;
  std::visit(
      [&]<typename D>(const D& d) {
        ops::for_each_field(std::type_identity<D>{}, [&](std::string_view name, auto member, ops::In) {
          dict[to_object(name)] = to_object(d.*member);
        });
      },
      desc);
  return dict;
}

std::vector<ops::ConfigEntry> config_entries_from_dict(const nb::dict& dict) {
  std::vector<ops::ConfigEntry> entries;
  for (const auto& [key, value] : dict) {
    ops::ConfigEntry entry;
    entry.key = text_of(key, "a parameter's name");
    if (nb::isinstance<nb::str>(value)) {
      entry.text = nb::cast<std::string>(value);
    } else {
      entry.value = integer_of(value, entry.key);
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

ops::Config config_from_dict(ops::Family family, const nb::dict& dict) {
  return ops::config_from_entries(family, config_entries_from_dict(dict));
}

nb::dict config_to_dict(ops::Family family, const ops::Config& config) {
  nb::dict dict;
  for (const ops::ConfigEntry& entry : ops::config_entries(family, config)) {
    dict[to_object(std::string_view(entry.key))] =
        entry.key == "variant" ? to_object(std::string_view(entry.text)) : to_object(entry.value);
  }
  return dict;
}

DeviceInfo device_from_dict(const std::optional<nb::dict>& dict) {
  if (!dict) return detect_cpu();
  DeviceInfo info;
  const std::array<std::pair<std::string_view, int64_t DeviceInfo::*>, 5> wide = {{
      {"memory_bytes", &DeviceInfo::memory_bytes},
      {"l1d_bytes", &DeviceInfo::l1d_bytes},
      {"l2_bytes", &DeviceInfo::l2_bytes},
      {"l3_bytes", &DeviceInfo::l3_bytes},
      {"shared_per_block_bytes", &DeviceInfo::shared_per_block_bytes},
  }};
  const std::array<std::pair<std::string_view, int DeviceInfo::*>, 4> narrow = {{
      {"cores", &DeviceInfo::cores},
      {"numa_nodes", &DeviceInfo::numa_nodes},
      {"compute_capability", &DeviceInfo::compute_capability},
      {"sm_count", &DeviceInfo::sm_count},
  }};
  std::vector<std::string_view> names = {"kind", "name", "isa", "features", "maps_memory", "pci_bus_id"};
  for (const auto& field : wide) names.push_back(field.first);
  for (const auto& field : narrow) names.push_back(field.first);
  for (const auto& [key, value] : *dict) {
    const std::string text = text_of(key, "a device property's name");
    if (text == "kind") {
      const std::string kind = text_of(value, text);
      DYNO_CHECK(ProfileError, kind == "cpu" || kind == "cuda", "[device] unknown kind '", kind,
                 "'; expected cpu or cuda");
      info.kind = kind == "cpu" ? DeviceKind::cpu : DeviceKind::cuda;
    } else if (text == "name") {
      info.name = text_of(value, text);
    } else if (text == "maps_memory") {
      DYNO_CHECK(ProfileError, nb::isinstance<nb::bool_>(value), "[device] maps_memory is not True or False");
      info.maps_memory = nb::cast<bool>(value);
    } else if (text == "pci_bus_id") {
      info.pci_bus_id = text_of(value, text);
    } else if (text == "isa") {
      info.isa = cpu_isa_from_name(text_of(value, text));
    } else if (text == "features") {
      info.cpu_features = nb::cast<std::vector<std::string>>(value);
    } else if (const auto w = std::find_if(wide.begin(), wide.end(), [&](auto& f) { return f.first == text; });
               w != wide.end()) {
      info.*(w->second) = integer_of(value, text);
    } else if (const auto n = std::find_if(narrow.begin(), narrow.end(), [&](auto& f) { return f.first == text; });
               n != narrow.end()) {
      info.*(n->second) = static_cast<int>(std::clamp<int64_t>(integer_of(value, text), 0, 1 << 30));
    } else {
      throw ProfileError(str_cat("[device] unknown property '", text, "'", suggestion(text, names)));
    }
  }
  return info;
}

}  // namespace dyno
