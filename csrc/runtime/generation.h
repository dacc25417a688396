// One generation: what is fed next and which draws follow. The session computes it, see Session::next_token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/args.h"
#include "ops/sample/settings.h"
#include "runtime/executor.h"

namespace dyno::runtime {

// Steps that may be under way ahead of the last token that was read: enough for the device never to wait for the host,
// and all that a text which ends unexpectedly costs.
inline constexpr size_t kStepsAhead = 2;

// Throws PlanError for a random number that is not in [0, 1).
void check_uniform(float uniform);

class Generation {
 public:
  Generation(int32_t slot, std::span<const int32_t> tokens, const ops::SampleSettings& settings)
      : slot_(slot), tokens_(tokens.begin(), tokens.end()), settings_(settings) {}

  int32_t slot() const { return slot_; }
  // To be fed next: one, or before the first draw all of a prompt.
  std::span<const int32_t> tokens() const { return tokens_; }
  const ops::SampleSettings& settings() const { return settings_; }

  // Draws still to be made, in their order; steps are launched only as far as they reach.
  std::span<const Draw> queued() const { return std::span(draws_).subspan(made_); }
  // Throws PlanError for a random number or a token that cannot be.
  void queue(std::span<const Draw> draws, int64_t n_vocab);

 private:
  friend class Session;

  // The first queued draw gave `drawn`, which the session has read.
  void accept(int32_t drawn) {
    const int32_t forced = draws_[made_++].forced;
    tokens_.assign(1, forced >= 0 ? forced : drawn);
  }

  int32_t slot_;
  std::vector<int32_t> tokens_;
  ops::SampleSettings settings_;
  std::vector<Draw> draws_;
  size_t made_ = 0;      // of them
  uint64_t number_ = 0;  // among those that the session has begun on the device
};

}  // namespace dyno::runtime
