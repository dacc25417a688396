// Factory of the GPU executor, for code that is compiled without a CUDA toolkit.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "core/thread_pool.h"
#include "gguf/gguf_file.h"
#include "runtime/backend.h"
#include "runtime/executor.h"

namespace dyno::runtime {

// Uploads the weights to the plan's only device, except those that another executor there has `lent` (its address of
// each weight, or null). The other arguments and that executor must outlive this one. Throws DeviceError in a build
// without CUDA.
std::unique_ptr<Executor> make_cuda_executor(const GgufFile& file, const model::ModelDesc& model,
                                             const plan::Plan& plan, ThreadPool& pool, int threads,
                                             std::span<const std::byte* const> lent = {});
// The same for one of several devices.
std::unique_ptr<Backend> make_cuda_backend(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan,
                                           plan::DeviceId device, ThreadPool& pool, int threads);

}  // namespace dyno::runtime
