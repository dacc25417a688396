// Barriers in shared memory over emulated threads.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>

namespace dyno::device {

struct EmulatedBarrier {
  int count = 0, missing = 0;
  int64_t bytes = 0;  // that are still to come
  uint32_t phase = 0;

  void look() {
    if (missing != 0 || bytes != 0) return;
    missing = count, phase ^= 1;
    emulated::moved = true;
  }
};
inline thread_local std::map<uint32_t, EmulatedBarrier> barriers;  // of the block that runs

inline EmulatedBarrier& barrier_at(uint32_t address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) throw std::runtime_error("no barrier was made there");
  return found->second;
}
inline void barrier_init(uint32_t barrier, int arrivals) { barriers[barrier] = {arrivals, arrivals, 0, 0}; }
inline void barrier_arrive(uint32_t barrier) {
  --barrier_at(barrier).missing;
  barrier_at(barrier).look();
}
inline void barrier_arrive_for_bytes(uint32_t barrier, uint32_t bytes) {
  barrier_at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (barrier_at(barrier).phase == parity) emulated::yield();
}
inline void named_sync(int id, int threads) {
  emulated::named[static_cast<size_t>(id)].wait(static_cast<unsigned>(threads));
}

}  // namespace dyno::device
