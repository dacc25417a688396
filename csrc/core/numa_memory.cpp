#include "core/numa_memory.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <utility>

#include "core/allowed_cpus.h"
#include "core/error.h"

namespace dyno {
namespace {

uintptr_t page_bytes() { return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

std::string place_pages(std::span<std::byte> memory, PagePolicy policy, std::span<const int> nodes) {
  const uintptr_t page = page_bytes(), at = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t begin = at / page * page, end = (at + memory.size()) / page * page;
  if (begin >= end || nodes.empty()) return "";
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> mask(static_cast<size_t>(*std::max_element(nodes.begin(), nodes.end())) / kBits + 1);
  for (const int node : nodes) mask[static_cast<size_t>(node) / kBits] |= 1UL << (static_cast<size_t>(node) % kBits);
  const int mode = policy == PagePolicy::prefer ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  // The kernel reads one bit fewer than this number says.
  if (syscall(SYS_mbind, begin, end - begin, mode, mask.data(), mask.size() * kBits + 1, 0) == 0) return "";
  return std::strerror(errno);
}

std::vector<int> nodes_of_pages(std::span<const std::byte> memory) {
  if (memory.empty()) return {};
  const uintptr_t page = page_bytes(), at = reinterpret_cast<uintptr_t>(memory.data());
  std::vector<void*> pages;
  for (uintptr_t i = at / page * page; i < at + memory.size(); i += page) pages.push_back(reinterpret_cast<void*>(i));
  std::vector<int> nodes(pages.size());
  // Without target nodes, the call reports nodes and moves nothing.
  DYNO_CHECK(Error, syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) == 0,
             "[numa] the system does not report the nodes of pages: ", std::strerror(errno));
  for (int& node : nodes) node = std::max(node, -1);
  return nodes;
}

ThreadOnCpus::ThreadOnCpus(std::span<const int> cpus) {
  std::vector<int> before = allowed_cpus();
  if (before.empty()) {
    problem_ = "the system does not report the cores of this thread";
    return;
  }
  problem_ = pin_this_thread(cpus);
  if (problem_.empty()) before_ = std::move(before);
}

ThreadOnCpus::~ThreadOnCpus() {
  // The cores may have gone offline meanwhile; the system has then moved the thread itself.
  if (!before_.empty()) (void)pin_this_thread(before_);
}

}  // namespace dyno
