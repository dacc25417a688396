// The NUMA nodes of the machine, as far as this process may use them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace dyno {

// Memory, and the cores that reach it soonest.
struct NumaNode {
  int number = 0;            // of the system: where the memory is
  std::vector<int> cpus;     // that the affinity of this process allows, ascending; one at least
  int64_t memory_bytes = 0;  // installed
};

// The nodes in the order of their numbers. Cores of a node whose memory is absent or forbidden (a cpuset) count to the
// node with the least distance to theirs; a node without any core of this process is left out. One entry for a machine
// that tells of no nodes. `root` holds sys and proc; empty: the environment variable DYNO_NUMA_ROOT (for tests), or
// "/".
std::vector<NumaNode> detect_numa_nodes(const std::string& root = "");

// The node, as an index, of thread `thread` of `threads`: neighbours stand together, and each node has threads in
// proportion to its cores.
size_t node_of_thread(std::span<const NumaNode> nodes, int thread, int threads);

// The numbers in a list such as "0-3,8,10-11"; empty for text that is no such list.
std::vector<int> parse_cpu_list(const std::string& text);

}  // namespace dyno
