// Finding a token's place in the cache from the runs of a batch, on the device.
#pragma once

#include "ops/args.h"

namespace dyno::ops {

// Cell of the cache (slot * slot_positions + position) of a token, or -1 for a token of no run.
__device__ __forceinline__ int64_t cell_of(const SequenceRun* runs, int n_runs, int64_t slot_positions, int token) {
  for (int r = 0; r < n_runs; ++r) {
    const SequenceRun run = runs[r];
    const int within = token - run.first_token;
    if (within >= 0 && within < run.n_tokens) return run.slot * slot_positions + run.position + within;
  }
  return -1;
}

}  // namespace dyno::ops
