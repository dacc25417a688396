// Pages and threads on NUMA nodes, by system calls: no library is needed for the few that there are.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace dyno {

// Where pages go when they are first touched. prefer: on the one node, and elsewhere once that is full. interleave: by
// turns over the nodes.
enum class PagePolicy : unsigned char { prefer, interleave };

// For the whole pages of `memory` from the one that its first byte lies in, up to the one of its last byte, which is
// left out unless it ends there. Pages that are there already stay where they are. Empty, or why the system refused.
std::string place_pages(std::span<std::byte> memory, PagePolicy policy, std::span<const int> nodes);

// The node of each page of `memory`; -1 for a page that is not resident. Throws Error if the system does not tell.
std::vector<int> nodes_of_pages(std::span<const std::byte> memory);

// Keeps the calling thread on these cores as long as it lives, then gives back the affinity that the thread had.
class ThreadOnCpus {
 public:
  ThreadOnCpus() = default;
  explicit ThreadOnCpus(std::span<const int> cpus);
  ~ThreadOnCpus();
  ThreadOnCpus(const ThreadOnCpus&) = delete;
  ThreadOnCpus& operator=(const ThreadOnCpus&) = delete;

  const std::string& problem() const { return problem_; }

 private:
  std::vector<int> before_;  // cores; empty: nothing was changed
  std::string problem_;
};

}  // namespace dyno
