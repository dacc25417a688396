// The control groups (cgroup v1 and v2) of this process: the one place that reads where they stand.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace dyno {

struct ControlGroup {
  std::filesystem::path folder;
  bool unified = true;  // version 2; else 1, whose files have other names
  bool cpu = false;     // its limits of this kind count
  bool memory = false;
};

// The groups that this process is in and each one above, the mounts included: a limit of any of them holds. `root`
// holds proc and sys ("" is "/"). In a container the path may be the host's and absent here; the
// mount itself is then the container's own group.
std::vector<ControlGroup> control_groups(const std::string& root);

// The word of that index in a file; empty if there is none.
std::string word_of(const std::filesystem::path& file, int index = 0);

// A whole number of 0 or more and nothing else: "max", "-1" and garbage are no number, and set no limit.
std::optional<int64_t> whole_number(std::string_view text);

}  // namespace dyno
