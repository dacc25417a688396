// Placement of pages and threads on NUMA nodes by system calls. A library is not worth it for so few calls.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace dyno {

// Where pages are placed when they are first touched. prefer: on one node, or on others once it is full. interleave:
// alternating between the nodes.
enum class PagePolicy : unsigned char { prefer, interleave };

// Sets the policy of the pages from the first byte of `memory` on. The last page is included only if `memory` fills it
// to its end. Resident pages do not move. Returns the reason if the system refuses, else an empty string.
std::string place_pages(std::span<std::byte> memory, PagePolicy policy, std::span<const int> nodes);

// The node of each page of `memory`; -1 for a page that is not resident. Throws Error if the system does not report it.
std::vector<int> nodes_of_pages(std::span<const std::byte> memory);

// Binds the calling thread to these cores for the lifetime of the object, then restores its previous affinity.
class ThreadOnCpus {
 public:
  ThreadOnCpus() = default;
  explicit ThreadOnCpus(std::span<const int> cpus);
  ~ThreadOnCpus();
  ThreadOnCpus(const ThreadOnCpus&) = delete;
  ThreadOnCpus& operator=(const ThreadOnCpus&) = delete;

  const std::string& problem() const { return problem_; }

 private:
  std::vector<int> before_;  // cores; empty if the affinity was not changed
  std::string problem_;
};

}  // namespace dyno
