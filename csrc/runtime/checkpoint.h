// A place that a sequence can be brought back to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace dyno::runtime {

// Made by Session::checkpoint(). Keys and values stay in the cache, so a checkpoint is good until the sequence forgets
// one of the positions before it; recurrent state is copied.
struct Checkpoint {
  int32_t slot = 0;
  int64_t position = 0;
  std::vector<std::byte> state;  // Plan::sequence_state_bytes()
  bool good = true;              // kept by the session
  bool spare = false;            // its window gives way to the ones of all others
};

}  // namespace dyno::runtime
