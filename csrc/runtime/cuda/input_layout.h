// Where the inputs of a u-batch stand in the executor's memory for them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/args.h"

namespace dyno::runtime {

// Offsets in bytes, tokens first: in one piece of memory, so that one copy brings all.
struct InputLayout {
  size_t positions, rows, runs, bytes;
  explicit InputLayout(int64_t ubatch) {
    const auto ints = static_cast<size_t>(ubatch) * sizeof(int32_t);
    positions = ints;
    rows = 2 * ints;
    runs = 3 * ints;
    bytes = runs + static_cast<size_t>(ubatch) * sizeof(ops::SequenceRun);
  }
};

}  // namespace dyno::runtime
