#include "runtime/executor_cuda.h"

#include "core/cuda_devices.h"
#include "core/error.h"
#ifdef DYNO_HAVE_CUDA
#include "runtime/cuda/executor_cuda.h"
#endif

namespace dyno::runtime {

std::unique_ptr<Executor> make_cuda_executor([[maybe_unused]] const GgufFile& file,
                                             [[maybe_unused]] const model::ModelDesc& model, const plan::Plan& plan,
                                             [[maybe_unused]] ThreadPool& pool, [[maybe_unused]] int threads) {
#ifdef DYNO_HAVE_CUDA
  const DeviceScope scope(plan.main_device().ordinal, "loading the weights");
  return std::make_unique<CudaExecutor>(file, model, plan, pool, threads);
#else
  throw DeviceError(str_cat("[cuda] device cuda:", plan.main_device().ordinal, ": ", no_cuda_reason()));
#endif
}

}  // namespace dyno::runtime
