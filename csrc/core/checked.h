// Arithmetic on sizes that come from a file or a user: a result past 64 bits is an error, not a small number.
#pragma once

#include <cstddef>

#include "core/error.h"

namespace dyno {

// `what` names the quantity in the message. Both throw PlanError with the two numbers.
inline size_t checked_mul(size_t a, size_t b, const char* what) {
  size_t out = 0;
  DYNO_CHECK(PlanError, !__builtin_mul_overflow(a, b, &out), "[plan] the size of ", what, ", ", a, " x ", b,
             ", does not fit 64 bits; use a smaller ctx, sequences or ubatch");
  return out;
}

inline size_t checked_add(size_t a, size_t b, const char* what) {
  size_t out = 0;
  DYNO_CHECK(PlanError, !__builtin_add_overflow(a, b, &out), "[plan] the size of ", what, ", ", a, " + ", b,
             ", does not fit 64 bits; use a smaller ctx, sequences or ubatch");
  return out;
}

inline size_t checked_align(size_t bytes, size_t alignment, const char* what) {
  return checked_add(bytes, alignment - 1, what) / alignment * alignment;
}

}  // namespace dyno
