// Finds a token's position in the cache from the runs of a batch, on the device.
#pragma once

#include "ops/args.h"

namespace dyno::ops {

// Cache index of a token (slot * slot_positions + position), or -1 for a token outside all runs. Called by a whole
// warp; each lane checks one run, because a serial search over the runs of many sequences takes longer than the work on
// the token.
__device__ __forceinline__ int64_t cell_of_warp(const SequenceRun* runs, int n_runs, int64_t slot_positions, int token,
                                                int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  for (int base = 0; base < n_runs; base += 32) {
    const int r = min(base + lane, n_runs - 1);
    const SequenceRun run = runs[r];
    const int within = token - run.first_token;
    const unsigned found = __ballot_sync(kAll, within >= 0 && within < run.n_tokens);
    if (found != 0) {
      return __shfl_sync(kAll, run.slot * slot_positions + run.position + within, __ffs(static_cast<int>(found)) - 1);
    }
  }
  return -1;
}

}  // namespace dyno::ops
