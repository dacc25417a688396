#include "core/numa_topology.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string_view>

#include "core/allowed_cpus.h"
#include "core/control_groups.h"
#include "core/error.h"

namespace dyno {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostNumbers = 1 << 16;  // of a list: more than the cores of any machine

std::string root_of(const std::string& given) {
  if (!given.empty()) return given;
  const char* forced = std::getenv("DYNO_NUMA_ROOT");
  return forced != nullptr && *forced != '\0' ? forced : "/";
}

// "Node 0 MemTotal: 15165652 kB"
int64_t installed(const fs::path& meminfo) {
  std::ifstream in(meminfo);
  for (std::string node, number, key, value, rest; in >> node >> number >> key >> value && std::getline(in, rest);) {
    if (key == "MemTotal:") return whole_number(value).value_or(0) << 10;
  }
  return 0;
}

// Numbers of the nodes whose memory the process may use; empty if the file has no list.
std::optional<std::vector<int>> allowed_memory(const fs::path& status) {
  std::ifstream in(status);
  for (std::string key, value, rest; in >> key >> value && std::getline(in, rest);) {
    if (key == "Mems_allowed_list:") return parse_cpu_list(value);
  }
  return std::nullopt;
}

struct Found {
  std::vector<int> cpus;
  std::vector<int> distances;  // to each node, in the order of their numbers
  int64_t memory_bytes = 0;    // 0: no usable memory
};

// `allowed`: ascending; empty means every CPU.
Found read_node(const fs::path& folder, const std::vector<int>& allowed) {
  Found node;
  node.memory_bytes = installed(folder / "meminfo");
  for (const int cpu : parse_cpu_list(word_of(folder / "cpulist"))) {
    if (allowed.empty() || std::binary_search(allowed.begin(), allowed.end(), cpu)) node.cpus.push_back(cpu);
  }
  std::ifstream distances(folder / "distance");
  for (int distance = 0; distances >> distance;) node.distances.push_back(distance);
  return node;
}

std::map<int, Found> read_nodes(const fs::path& root) {
  std::map<int, Found> nodes;
  const std::vector<int> allowed = allowed_cpus();
  std::error_code absent;
  for (const auto& entry : fs::directory_iterator(root / "sys/devices/system/node", absent)) {
    const std::string name = entry.path().filename();
    const auto number = name.starts_with("node") ? whole_number(std::string_view(name).substr(4)) : std::nullopt;
    if (number && *number < kMostNumbers) nodes[static_cast<int>(*number)] = read_node(entry.path(), allowed);
  }
  const auto memory = allowed_memory(root / "proc/self/status");
  for (auto& [number, node] : nodes) {
    if (memory && std::find(memory->begin(), memory->end(), number) == memory->end()) node.memory_bytes = 0;
  }
  return nodes;
}

// The node with memory that is nearest to `node`; the first of equally near ones.
std::optional<int> nearest(const std::map<int, Found>& nodes, int number) {
  const Found& from = nodes.at(number);
  if (from.memory_bytes > 0) return number;
  std::optional<int> best;
  int least = 0;
  size_t at = 0;
  for (const auto& [other, node] : nodes) {
    const int distance = at < from.distances.size() ? from.distances[at] : 255;
    ++at;
    if (node.memory_bytes == 0 || (best && distance >= least)) continue;
    best = other;
    least = distance;
  }
  return best;
}

}  // namespace

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> out;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string_view part = std::string_view(text).substr(begin, end - begin);
    const size_t dash = part.find('-');
    const auto first = whole_number(part.substr(0, dash));
    const auto last = dash == std::string_view::npos ? first : whole_number(part.substr(dash + 1));
    if (!first || !last || *last < *first || *last >= kMostNumbers) return {};
    for (int64_t i = *first; i <= *last; ++i) out.push_back(static_cast<int>(i));
    begin = end + 1;
  }
  return out;
}

std::vector<NumaNode> detect_numa_nodes(const std::string& root) {
  const std::map<int, Found> found = read_nodes(root_of(root));
  std::map<int, NumaNode> nodes;
  for (const auto& [number, node] : found) {
    const auto home = nearest(found, number);
    if (!home || node.cpus.empty()) continue;
    NumaNode& all = nodes[*home];
    all.number = *home;
    all.memory_bytes = found.at(*home).memory_bytes;
    all.cpus.insert(all.cpus.end(), node.cpus.begin(), node.cpus.end());
  }
  std::vector<NumaNode> out;
  for (auto& [number, node] : nodes) {
    std::sort(node.cpus.begin(), node.cpus.end());
    out.push_back(std::move(node));
  }
  if (out.empty()) out.emplace_back();
  return out;
}

size_t node_of_thread(std::span<const NumaNode> nodes, int thread, int threads) {
  DYNO_CHECK(Error, !nodes.empty() && thread >= 0 && thread < threads, "[numa] thread ", thread, " of ", threads,
             " on ", nodes.size(), " nodes");
  int64_t cores = 0;
  for (const NumaNode& node : nodes) cores += static_cast<int64_t>(node.cpus.size());
  int64_t place = thread * cores / threads;
  for (size_t i = 0; i + 1 < nodes.size(); ++i) {
    place -= static_cast<int64_t>(nodes[i].cpus.size());
    if (place < 0) return i;
  }
  return nodes.size() - 1;
}

}  // namespace dyno
