// The depth of a u-batch's contexts, for launches that divide their work by it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>

#include "ops/args.h"

namespace dyno::runtime {

// Upper bound of the positions of every run, after its tokens. If each run has one token, it is rounded up to one of
// kDepths: such a u-batch may be captured, the launches of a graph keep their division, and few graphs should do.
inline constexpr int64_t kDepths[] = {256, 512, 1024, 2048, 4096, 8192, 32768, 131072};
inline int64_t launch_depth(std::span<const ops::SequenceRun> runs) {
  int64_t most = 0;
  bool steps = true;
  for (const ops::SequenceRun& run : runs) {
    most = std::max(most, int64_t{run.position} + run.n_tokens);
    steps = steps && run.n_tokens == 1;
  }
  if (!steps) return most;
  const auto* rounded = std::ranges::lower_bound(kDepths, most);
  return rounded == std::end(kDepths) ? int64_t{1} << 40 : *rounded;
}

}  // namespace dyno::runtime
