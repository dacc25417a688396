// A generation: the tokens to feed next and the queued samples. The session computes it, see Session::next_token.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ops/args.h"
#include "ops/sample/settings.h"
#include "runtime/executor.h"

namespace dyno::runtime {

// Steps that may be started ahead of the last token that was read. Two are enough to keep the device busy, and an
// unexpected end of the text wastes no more than these.
inline constexpr size_t kStepsAhead = 2;

// Throws PlanError for a random number that is not in [0, 1).
void check_uniform(float uniform);

class Generation {
 public:
  Generation(int32_t slot, std::span<const int32_t> tokens, const ops::SampleSettings& settings)
      : slot_(slot), tokens_(tokens.begin(), tokens.end()), settings_(settings) {}

  int32_t slot() const { return slot_; }
  // The tokens to feed next: one token, or the whole prompt before the first sample.
  std::span<const int32_t> tokens() const { return tokens_; }
  const ops::SampleSettings& settings() const { return settings_; }

  // Samples that are queued but not made, in order. Steps are started only for queued samples.
  std::span<const Draw> queued() const { return std::span(draws_).subspan(made_); }
  // Throws PlanError for an invalid random number or token.
  void queue(std::span<const Draw> draws, int64_t n_vocab);

 private:
  friend class Session;

  // The first queued sample gave `drawn`, which the session has read.
  void accept(int32_t drawn) {
    const int32_t forced = draws_[made_++].forced;
    tokens_.assign(1, forced >= 0 ? forced : drawn);
  }

  int32_t slot_;
  std::vector<int32_t> tokens_;
  ops::SampleSettings settings_;
  std::vector<Draw> draws_;
  size_t made_ = 0;      // number of samples that were made
  uint64_t number_ = 0;  // number among the generations that the session has started on the device
};

}  // namespace dyno::runtime
