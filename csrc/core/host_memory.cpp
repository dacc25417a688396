#include "core/host_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string_view>

#include "core/control_groups.h"

namespace dyno {
namespace {

namespace fs = std::filesystem;

// The number after `name` in a file with a name and a number on each line.
int64_t field(const fs::path& path, std::string_view name) {
  std::ifstream in(path);
  std::string key, value;
  while (in >> key >> value) {
    if (key == name) return whole_number(value).value_or(0);
  }
  return 0;
}

std::optional<int64_t> system_available(const std::string& root) {
  std::ifstream in(fs::path(root.empty() ? "/" : root) / "proc/meminfo");
  std::string key, value;
  for (std::string rest; in >> key >> value && std::getline(in, rest);) {
    const auto kib = key == "MemAvailable:" ? whole_number(value) : std::nullopt;
    if (kib) return *kib << 10;
  }
  return std::nullopt;
}

struct Names {
  const char *limit, *usage, *inactive, *active;
};

// The bytes that one group leaves: its limit minus its use without page cache.
std::optional<int64_t> group_available(const fs::path& folder, const Names& names) {
  const auto limit = whole_number(word_of(folder / names.limit));
  const auto usage = whole_number(word_of(folder / names.usage));
  if (!limit || !usage) return std::nullopt;
  const fs::path stat = folder / "memory.stat";
  int64_t used = *usage;
  for (const char* cache : {names.inactive, names.active}) used -= std::min(used, field(stat, cache));
  return std::max<int64_t>(0, *limit - used);
}

}  // namespace

std::optional<size_t> available_host_bytes(const std::string& root) {
  std::optional<int64_t> least = system_available(root);
  constexpr Names kV2 = {"memory.max", "memory.current", "inactive_file", "active_file"};
  constexpr Names kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};
  for (const ControlGroup& group : control_groups(root)) {
    const auto left = group.memory ? group_available(group.folder, group.unified ? kV2 : kV1) : std::nullopt;
    if (left) least = std::min(least.value_or(*left), *left);
  }
  return least;
}

}  // namespace dyno
