// Arithmetic on sizes that a file or a caller decides: what does not fit into size_t is an error, never a small number.
#pragma once

#include <cstddef>

#include "core/error.h"

namespace dyno {

// a * b. Throws PlanError with both factors; `purpose` names the memory, e.g. "the KV cache".
inline size_t checked_mul(size_t a, size_t b, const char* purpose) {
  size_t product = 0;
  DYNO_CHECK(PlanError, !__builtin_mul_overflow(a, b, &product), "[plan] ", purpose, " needs ", a, " x ", b,
             " bytes, more than can be addressed");
  return product;
}

// a + b. Throws PlanError with both terms.
inline size_t checked_add(size_t a, size_t b, const char* purpose) {
  size_t sum = 0;
  DYNO_CHECK(PlanError, !__builtin_add_overflow(a, b, &sum), "[plan] ", purpose, " needs ", a, " + ", b,
             " bytes, more than can be addressed");
  return sum;
}

// The next multiple of `alignment`, which is a power of two.
inline size_t checked_align(size_t bytes, size_t alignment, const char* purpose) {
  return checked_add(bytes, alignment - 1, purpose) / alignment * alignment;
}

}  // namespace dyno
