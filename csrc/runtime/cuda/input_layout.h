// Layout of a u-batch's inputs in the executor's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/args.h"
#include "ops/sample/settings.h"

namespace dyno::runtime {

// Offsets in bytes; tokens come first. One contiguous range, so that one copy uploads everything. They depend on the
// number of tokens of the u-batch, so that the copy for a few tokens is short; launches of one graph have one number.
struct InputLayout {
  size_t positions, rows, runs;
  size_t settings, uniforms;  // of the rows to sample from
  size_t bytes;
  explicit InputLayout(int64_t tokens) {
    const auto count = static_cast<size_t>(tokens);
    const auto after = [&](size_t begin, size_t each) { return begin + (count * each + 15) / 16 * 16; };
    positions = after(0, sizeof(int32_t));
    rows = after(positions, sizeof(int32_t));
    runs = after(rows, sizeof(int32_t));
    settings = after(runs, sizeof(ops::SequenceRun));
    uniforms = after(settings, sizeof(ops::SampleSettings));
    bytes = after(uniforms, sizeof(float));
  }
};

}  // namespace dyno::runtime
