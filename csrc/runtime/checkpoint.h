// A position that a sequence can return to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace dyno::runtime {

// Created by Session::checkpoint(). Keys and values stay in the cache, so a checkpoint is valid until the sequence
// forgets one of the positions before it. Recurrent state is copied.
struct Checkpoint {
  int32_t slot = 0;
  int64_t position = 0;
  std::vector<std::byte> state;  // Plan::sequence_state_bytes()
  bool good = true;              // valid; updated by the session
  bool spare = false;            // its window is dropped before the windows of other checkpoints
};

}  // namespace dyno::runtime
