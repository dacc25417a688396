// The pause of a thread between two looks at memory that another one will write.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <thread>
#endif

namespace dyno {

// Leaves the core's other thread room and keeps the core: one that is given away may not come back for a slice of the
// scheduler, which is longer than a token.
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace dyno
