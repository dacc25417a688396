// The most probable token of a row of logits, for drafts that end where that is not certain enough.
#pragma once

#include <cstdint>

namespace dyno::runtime {

struct Likely {
  int32_t token = -1;  // the first of several; -1: the logits are not finite
  float probability = 0;
};

}  // namespace dyno::runtime
