// Weights in device memory, in the layouts of the plan.
#pragma once

#include <vector>

#include "core/thread_pool.h"
#include "gguf/gguf_file.h"
#include "plan/plan.h"
#include "runtime/cuda/handles.h"

namespace dyno::runtime {

class CudaWeights {
 public:
  // Those that the plan has on `device`. Copies through page-locked memory and repacks on the device; returns when all
  // weights are there. Throws OutOfMemoryError, DeviceError.
  CudaWeights(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan, plan::DeviceId device,
              ThreadPool& pool, int threads);

  const std::byte* data(model::WeightId id) const { return data_[static_cast<size_t>(id)]; }
  // For matrices that come to the place of others.
  std::byte* memory(model::WeightId id) { return data_[static_cast<size_t>(id)]; }

 private:
  DeviceBuffer memory_;
  std::vector<std::byte*> data_;
};

}  // namespace dyno::runtime
