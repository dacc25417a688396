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
  // Those that the plan has on `device`. Copies through page-locked memory and repacks on the device; returns when all
  // weights are there. Throws OutOfMemoryError, DeviceError. `lent`: where WeightPlacement::lent ones lie, parallel to
  // the weights; empty without any.
  CudaWeights(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan, plan::DeviceId device,
              ThreadPool& pool, int threads, std::span<const std::byte* const> lent);

  const std::byte* data(model::WeightId id) const {
    const auto at = static_cast<size_t>(id);
    return data_[at] != nullptr || lent_.empty() ? data_[at] : lent_[at];
  }
  // For matrices that come to the place of others.
  std::byte* memory(model::WeightId id) { return data_[static_cast<size_t>(id)]; }

 private:
  DeviceBuffer memory_;
  std::vector<std::byte*> data_;  // null of what lies elsewhere
  std::vector<const std::byte*> lent_;
};

}  // namespace dyno::runtime
