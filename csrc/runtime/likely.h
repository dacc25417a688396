// The most probable token of a row of logits. A draft ends if its probability is too low.
#pragma once

#include <cstdint>

namespace dyno::runtime {

struct Likely {
  int32_t token = -1;  // the first one of equals; -1: the logits are not finite
  float probability = 0;
};

}  // namespace dyno::runtime
