// Kernels of short_conv, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {
struct ShortConvShape {
  int64_t n, taps;
  bool silu, gated;
};
}  // namespace dyno::ops

// clang-format off
DYNO_DECLARE_KERNELS(
    // Computes channels [begin, end) of all runs.
    void conv_channels(const ShortConvArgs& args, const ShortConvShape& shape, int64_t begin, int64_t end);
)
// clang-format on
