#include "core/cpu_limits.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace dyno {
namespace {

namespace fs = std::filesystem;

// A positive whole number and nothing else: "max", "-1" and garbage set no limit.
std::optional<int64_t> positive(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value <= 0) return std::nullopt;
  return value;
}

std::string word(const fs::path& file, int index = 0) {
  std::ifstream in(file);
  std::string text;
  for (int i = 0; i <= index; ++i) {
    if (!(in >> text)) return "";
  }
  return text;
}

void take_quota(CpuLimits& limits, const fs::path& file, const std::string& quota, const std::string& period) {
  const auto q = positive(quota), p = positive(period);
  if (!q || !p) return;
  const double cpus = static_cast<double>(*q) / static_cast<double>(*p);
  if (limits.quota == 0 || cpus < limits.quota) {
    limits.quota = cpus;
    limits.quota_from = file.string();
  }
}

void take_memory(CpuLimits& limits, const fs::path& file) {
  // Version 1 writes "no limit" as a number near 2^63, which is above all installed memory.
  const auto bytes = positive(word(file));
  if (!bytes || *bytes >= limits.memory_bytes) return;
  limits.memory_bytes = *bytes;
  limits.memory_from = file.string();
}

// Calls look(folder) for the group's folder and each one above it, the mount included. In a container the path may be
// the host's and absent here; the mount itself is then the container's own group.
template <typename Look>
void walk_up(const fs::path& mount, const std::string& group, const Look& look) {
  fs::path inside = fs::path(group).relative_path();
  if (std::find(inside.begin(), inside.end(), "..") != inside.end()) inside.clear();
  for (; !inside.empty(); inside = inside.parent_path()) look(mount / inside);
  look(mount);
}

}  // namespace

CpuLimits detect_cpu_limits(const std::string& root) {
  CpuLimits limits;
  limits.online = static_cast<int>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
  cpu_set_t set;
  limits.affinity = sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
  limits.installed_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  limits.memory_bytes = limits.installed_bytes;

  const fs::path mount = fs::path(root) / "sys/fs/cgroup";
  std::ifstream groups(fs::path(root) / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // hierarchy:controllers:path; version 2 names no controllers.
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (controllers.empty()) {
      walk_up(mount, group, [&](const fs::path& folder) {
        const fs::path file = folder / "cpu.max";
        take_quota(limits, file, word(file, 0), word(file, 1));
        take_memory(limits, folder / "memory.max");
      });
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      // The mount has the name of one controller or of all of them together; one is often a link to the other.
      std::error_code absent;
      const fs::path of_one = mount / name, base = fs::exists(of_one, absent) ? of_one : mount / controllers;
      walk_up(base, group, [&](const fs::path& folder) {
        const fs::path file = folder / "cpu.cfs_quota_us";
        if (name == "cpu") take_quota(limits, file, word(file), word(folder / "cpu.cfs_period_us"));
        if (name == "memory") take_memory(limits, folder / "memory.limit_in_bytes");
      });
    }
  }
  // Rounded down: at 1.5 CPUs a second thread is stopped for half of each period, and the first waits for it.
  limits.cores = limits.affinity;
  if (limits.quota > 0 && limits.quota < limits.affinity) limits.cores = std::max(1, static_cast<int>(limits.quota));
  return limits;
}

}  // namespace dyno
