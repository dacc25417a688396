// Emulated launches follow each other.
#pragma once

namespace dyno::device {

inline void wait_for_previous() {}
inline void let_next_start() {}

}  // namespace dyno::device
