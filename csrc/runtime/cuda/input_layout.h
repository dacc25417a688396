// Layout of a u-batch's inputs in the executor's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/args.h"

namespace dyno::runtime {

// Offsets in bytes; tokens come first. One contiguous range, so that one copy uploads everything.
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
