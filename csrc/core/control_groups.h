// The control groups (cgroup v1 and v2) of this process. No other file knows where they are mounted.
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
  bool unified = true;  // version 2, else version 1, which has other file names
  bool cpu = false;     // the CPU limits of this group apply
  bool memory = false;
};

// The groups of this process and all their parents up to the mounts. A limit of any of them applies. `root` is the
// folder that holds proc and sys ("" means "/"). In a container, the path may be the host's and missing here; the mount
// is then the container's own group.
std::vector<ControlGroup> control_groups(const std::string& root);

// Word number `index` of a file; empty if the file has fewer words.
std::string word_of(const std::filesystem::path& file, int index = 0);

// A whole number of 0 or more. "max", "-1" and other text give nothing, and thus set no limit.
std::optional<int64_t> whole_number(std::string_view text);

}  // namespace dyno
