#include "core/allowed_cpus.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

namespace dyno {
namespace {

constexpr size_t kMostCpus = size_t{1} << 20;  // no kernel has as many

struct FreeSet {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using Set = std::unique_ptr<cpu_set_t, FreeSet>;

}  // namespace

std::vector<int> allowed_cpus() {
  // A kernel that knows more CPUs than the set has room for refuses it.
  for (size_t room = CPU_SETSIZE; room <= kMostCpus; room *= 2) {
    const Set set(CPU_ALLOC(room));
    const size_t bytes = CPU_ALLOC_SIZE(room);
    if (set == nullptr) return {};
    if (sched_getaffinity(0, bytes, set.get()) == 0) {
      std::vector<int> cpus;
      for (size_t cpu = 0; cpu < room; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, set.get())) cpus.push_back(static_cast<int>(cpu));
      }
      return cpus;
    }
    if (errno != EINVAL) return {};
  }
  return {};
}

std::string pin_this_thread(std::span<const int> cpus) {
  size_t room = CPU_SETSIZE;
  for (const int cpu : cpus) room = std::max(room, static_cast<size_t>(cpu) + 1);
  const Set set(CPU_ALLOC(room));
  if (set == nullptr) return std::strerror(ENOMEM);
  const size_t bytes = CPU_ALLOC_SIZE(room);
  CPU_ZERO_S(bytes, set.get());
  for (const int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, set.get());
  return sched_setaffinity(0, bytes, set.get()) == 0 ? "" : std::strerror(errno);
}

}  // namespace dyno
