#include "core/control_groups.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

namespace dyno {
namespace {

namespace fs = std::filesystem;

void add_up_to(std::vector<ControlGroup>& found, const fs::path& mount, const std::string& group, ControlGroup kind) {
  fs::path inside = fs::path(group).relative_path();
  if (std::find(inside.begin(), inside.end(), "..") != inside.end()) inside.clear();
  for (;; inside = inside.parent_path()) {
    kind.folder = inside.empty() ? mount : mount / inside;
    found.push_back(kind);
    if (inside.empty()) return;
  }
}

std::vector<ControlGroup> groups_of(std::istream& lines, const fs::path& mount) {
  std::vector<ControlGroup> found;
  for (std::string line; std::getline(lines, line);) {
    // hierarchy:controllers:path; version 2 names no controllers.
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (controllers.empty()) {
      add_up_to(found, mount, group, {.folder = {}, .unified = true, .cpu = true, .memory = true});
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name != "cpu" && name != "memory") continue;
      // The mount has the name of one controller or of all of them together; one is often a link to the other.
      std::error_code absent;
      const fs::path of_one = mount / name, base = fs::exists(of_one, absent) ? of_one : mount / controllers;
      add_up_to(found, base, group, {.folder = {}, .unified = false, .cpu = name == "cpu", .memory = name == "memory"});
    }
  }
  return found;
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& root) {
  const fs::path top = root.empty() ? "/" : root;
  const fs::path mount = top / "sys/fs/cgroup";
  std::ifstream lines(top / "proc/self/cgroup");
  std::vector<ControlGroup> found = groups_of(lines, mount);
  if (!found.empty()) return found;
  // Without a list the mounts are left, in which a container finds its own group.
  std::istringstream usual("0::/\n1:cpu:/\n2:memory:/\n");
  return groups_of(usual, mount);
}

std::string word_of(const fs::path& file, int index) {
  std::ifstream in(file);
  std::string text;
  for (int i = 0; i <= index; ++i) {
    if (!(in >> text)) return "";
  }
  return text;
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

}  // namespace dyno
