// The NUMA nodes of the machine that this process may use.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dyno {

// A node: its memory, and the cores nearest to it.
struct NumaNode {
  int number = 0;            // number of the node in the system
  std::vector<int> cpus;     // cores in the affinity of this process, ascending; at least one
  int64_t memory_bytes = 0;  // installed
};

// The nodes in ascending order. If the memory of a node is absent or forbidden (by a cpuset), its cores belong to the
// nearest node with memory. A node without a core of this process is left out. A machine that reports no nodes has one
// entry. `root` is the folder that holds sys and proc; if empty, the environment variable DYNO_NUMA_ROOT (for tests) or
// "/".
std::vector<NumaNode> detect_numa_nodes(const std::string& root = "");

// The index of the node for thread `thread` of `threads`. Consecutive threads share a node, and each node gets threads
// in proportion to its cores.
size_t node_of_thread(std::span<const NumaNode> nodes, int thread, int threads);

// The numbers in a list such as "0-3,8,10-11"; empty for malformed text.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace dyno
