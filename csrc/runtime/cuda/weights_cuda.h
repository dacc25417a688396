// Weights in device memory, in the layouts of the plan.
#pragma once

#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "gguf/gguf_file.h"
#include "plan/plan.h"
#include "runtime/cuda/handles.h"

namespace dyno::runtime {

class CudaWeights {
 public:
  // Loads the plan's weights on `device`. Copies them through page-locked memory, repacks on the device, and returns
  // when all weights are complete. `lent`: the addresses of weights with WeightPlacement::lent, parallel to the
  // weights; empty if there are none. Throws OutOfMemoryError, DeviceError.
  CudaWeights(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan, plan::DeviceId device,
              ThreadPool& pool, int threads, std::span<const std::byte* const> lent);

  const std::byte* data(model::WeightId id) const {
    const auto at = static_cast<size_t>(id);
    return data_[at] != nullptr || lent_.empty() ? data_[at] : lent_[at];
  }
  // For matrices that replace others.
  std::byte* memory(model::WeightId id) { return data_[static_cast<size_t>(id)]; }

 private:
  DeviceBuffer memory_;
  std::vector<std::byte*> data_;  // null for weights on other devices
  std::vector<const std::byte*> lent_;
};

}  // namespace dyno::runtime
