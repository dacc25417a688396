// How often tokens chose each expert of layers with cached ones, counted on a GPU beside the split of the ids. Counts
// only grow there. They come to the host behind each u-batch, so launches and replays of graphs need no order with
// whoever reads them.
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
  // Likewise if the plan's expert cache does not adapt. `stream`: of all launches.
  ChoiceCounts(const plan::Plan& plan, cudaStream_t stream);

  // Of a layer, on the device, by expert; null: nobody counts them.
  int32_t* of(int32_t layer) const {
    if (counts_.size() == 0) return nullptr;
    return reinterpret_cast<int32_t*>(counts_.data()) + begins_[static_cast<size_t>(layer)];
  }
  // Behind a u-batch: its counts go to the host, unless those of another one are still on their way.
  void send();
  // Of a layer, by expert: choices since the last call among those that had come to the host at the last send().
  std::vector<int64_t> take(int32_t layer);

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<size_t> begins_;  // by layer, in counts; one more behind the last
  DeviceBuffer counts_;
  // One has the newest counts that are here, the other those that are on their way.
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
