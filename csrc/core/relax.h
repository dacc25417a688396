// The pause of a thread that spins on memory until another thread writes it.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <thread>
#endif

namespace dyno {

// Leaves resources to the core's other hardware thread, but keeps the core. A yielded core may return only after a
// scheduler slice, which is longer than a token.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace dyno
