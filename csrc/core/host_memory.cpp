#include "core/host_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string_view>
#include <utility>
#include <vector>

namespace dyno {
namespace {

std::optional<size_t> number(std::string_view text) {
  size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end != text.data() ? std::optional(value) : std::nullopt;
}

std::optional<size_t> read_number(const std::string& path) {
  std::ifstream in(path);
  std::string word;
  return in >> word ? number(word) : std::nullopt;  // "max" is no number: no limit
}

// The number after `name` in lines of a name and a number.
size_t field(const std::string& path, std::string_view name) {
  std::ifstream in(path);
  std::string key, value;
  while (in >> key >> value) {
    if (key == name) return number(value).value_or(0);
  }
  return 0;
}

std::optional<size_t> system_available(const std::string& root) {
  std::ifstream in(root + "/proc/meminfo");
  std::string line;
  while (std::getline(in, line)) {
    constexpr std::string_view kName = "MemAvailable:";
    if (!line.starts_with(kName)) continue;
    const size_t digit = line.find_first_of("0123456789");
    if (digit == std::string::npos) return std::nullopt;
    const auto kib = number(std::string_view(line).substr(digit));
    return kib ? std::optional(*kib << 10) : std::nullopt;
  }
  return std::nullopt;
}

struct Names {
  const char *limit, *usage, *inactive, *active;
};

// What one group leaves: its limit less what it uses, page cache not counted.
std::optional<size_t> group_available(const std::string& folder, const Names& names) {
  const auto limit = read_number(folder + "/" + names.limit);
  const auto usage = read_number(folder + "/" + names.usage);
  if (!limit || !usage) return std::nullopt;
  const std::string stat = folder + "/memory.stat";
  const size_t cache = std::min(*usage, field(stat, names.inactive) + field(stat, names.active));
  const size_t used = *usage - cache;
  return *limit > used ? *limit - used : 0;
}

// This process' group in the hierarchy of `controller` ("" for v2), from lines "id:controllers:path".
std::string group_path(const std::string& root, std::string_view controller) {
  std::ifstream in(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    if (std::string_view(line).substr(first + 1, second - first - 1) == controller) return line.substr(second + 1);
  }
  return "/";
}

}  // namespace

std::optional<size_t> available_host_bytes(const std::string& root) {
  std::optional<size_t> least = system_available(root);
  constexpr Names kV2 = {"memory.max", "memory.current", "inactive_file", "active_file"};
  constexpr Names kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"};
  const std::pair<std::string, std::string> groups[] = {{"/sys/fs/cgroup", group_path(root, "")},
                                                        {"/sys/fs/cgroup/memory", group_path(root, "memory")}};
  for (size_t i = 0; i < 2; ++i) {
    // A limit of any group above holds as well. Inside a container the path may lead nowhere, but its root is there.
    for (std::string path = groups[i].second;; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      const auto left = group_available(root + groups[i].first + path, i == 0 ? kV2 : kV1);
      if (left) least = std::min(least.value_or(*left), *left);
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

}  // namespace dyno
