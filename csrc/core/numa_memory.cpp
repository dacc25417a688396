#include "core/numa_memory.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>

#include "core/error.h"

namespace dyno {
namespace {

uintptr_t page_bytes() { return static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)); }

cpu_set_t set_of(std::span<const int> cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &set);
  }
  return set;
}

}  // namespace

std::string place_pages(std::span<std::byte> memory, PagePolicy policy, std::span<const int> nodes) {
  const uintptr_t page = page_bytes(), at = reinterpret_cast<uintptr_t>(memory.data());
  const uintptr_t begin = at / page * page, end = (at + memory.size()) / page * page;
  if (begin >= end || nodes.empty()) return "";
  constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> mask(static_cast<size_t>(*std::max_element(nodes.begin(), nodes.end())) / kBits + 1);
  for (const int node : nodes) mask[static_cast<size_t>(node) / kBits] |= 1UL << (static_cast<size_t>(node) % kBits);
  const int mode = policy == PagePolicy::prefer ? MPOL_PREFERRED : MPOL_INTERLEAVE;
  // The kernel takes one bit less than it is told.
  if (syscall(SYS_mbind, begin, end - begin, mode, mask.data(), mask.size() * kBits + 1, 0) == 0) return "";
  return std::strerror(errno);
}

std::vector<int> nodes_of_pages(std::span<const std::byte> memory) {
  if (memory.empty()) return {};
  const uintptr_t page = page_bytes(), at = reinterpret_cast<uintptr_t>(memory.data());
  std::vector<void*> pages;
  for (uintptr_t i = at / page * page; i < at + memory.size(); i += page) pages.push_back(reinterpret_cast<void*>(i));
  std::vector<int> nodes(pages.size());
  // Without targets nothing is moved.
  DYNO_CHECK(Error, syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0) == 0,
             "[numa] the system does not tell where pages lie: ", std::strerror(errno));
  for (int& node : nodes) node = std::max(node, -1);
  return nodes;
}

std::string pin_this_thread(std::span<const int> cpus) {
  const cpu_set_t set = set_of(cpus);
  return sched_setaffinity(0, sizeof(set), &set) == 0 ? "" : std::strerror(errno);
}

ThreadOnCpus::ThreadOnCpus(std::span<const int> cpus) {
  cpu_set_t before;
  if (sched_getaffinity(0, sizeof(before), &before) != 0) {
    problem_ = std::strerror(errno);
    return;
  }
  problem_ = pin_this_thread(cpus);
  if (!problem_.empty()) return;
  before_.resize(sizeof(before));
  std::memcpy(before_.data(), &before, sizeof(before));
}

ThreadOnCpus::~ThreadOnCpus() {
  if (before_.empty()) return;
  cpu_set_t before;
  std::memcpy(&before, before_.data(), sizeof(before));
  // Cores may have gone meanwhile; the system then has put the thread where it may run.
  (void)sched_setaffinity(0, sizeof(before), &before);
}

}  // namespace dyno
