// Checks of a batch's runs, shared by the families that access the KV cache.
#pragma once

#include "core/error.h"
#include "ops/args.h"

namespace dyno::ops {

// Throws PlanError for a run outside the batch of `m` tokens, or outside the `slot_positions` positions of a sequence.
inline void check_runs(const char* family, const SequenceRun* runs, int32_t n_runs, int64_t m, int64_t slot_positions) {
  for (int32_t i = 0; i < n_runs; ++i) {
    const SequenceRun& run = runs[i];
    DYNO_CHECK(PlanError, run.n_tokens >= 0 && run.first_token >= 0 && int64_t{run.first_token} + run.n_tokens <= m,
               "[", family, "] run ", i, ": tokens ", run.first_token, "+", run.n_tokens, " in a batch of ", m);
    DYNO_CHECK(PlanError, run.slot >= 0 && run.position >= 0 && int64_t{run.position} + run.n_tokens <= slot_positions,
               "[", family, "] run ", i, ": positions ", run.position, "+", run.n_tokens, " of slot ", run.slot,
               " in a cache of ", slot_positions, " positions");
  }
}

}  // namespace dyno::ops
