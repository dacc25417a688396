// Counts how often tokens chose each expert, for layers with cached experts. The GPU counts in the op that splits the
// ids. Counts on the device only grow, and are copied to the host after each u-batch. So launches and graph replays
// need no order relative to the reader.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "runtime/cuda/handles.h"

namespace dyno::runtime {

class ChoiceCounts {
 public:
  ChoiceCounts() = default;  // counts nothing
  // Counts nothing if the plan's expert cache does not adapt. `stream`: the stream of all launches.
  ChoiceCounts(const plan::Plan& plan, cudaStream_t stream);

  // The counts of a layer on the device, by expert; null if they are not needed.
  int32_t* of(int32_t layer) const {
    if (counts_.size() == 0) return nullptr;
    return reinterpret_cast<int32_t*>(counts_.data()) + begins_[static_cast<size_t>(layer)];
  }
  // Called after a u-batch: copies the counts to the host, unless a previous copy is still running.
  void send();
  // Choices of a layer, by expert, since the last call, from the counts that had reached the host at the last send().
  std::vector<int64_t> take(int32_t layer);

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<size_t> begins_;  // by layer: index of its first count; one additional entry at the end
  DeviceBuffer counts_;
  // One copy has the newest complete counts, the other is in transfer.
  struct Copy {
    PinnedBuffer memory;
    Event there;
  };
  std::array<Copy, 2> copies_;
  size_t newest_ = 0;
  bool under_way_ = false;
  std::vector<uint32_t> taken_;
};

}  // namespace dyno::runtime
