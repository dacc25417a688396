#include "runtime/executor_cuda.h"

#include "core/cuda_devices.h"
#include "core/error.h"
#ifdef DYNO_HAVE_CUDA
#include "runtime/cuda/executor_cuda.h"
#endif

namespace dyno::runtime {
namespace {

template <typename Base>
std::unique_ptr<Base> make([[maybe_unused]] const GgufFile& file, [[maybe_unused]] const model::ModelDesc& model,
                           const plan::Plan& plan, plan::DeviceId device, [[maybe_unused]] ThreadPool& pool,
                           [[maybe_unused]] int threads, [[maybe_unused]] std::span<const std::byte* const> lent) {
  const int ordinal = plan.device(device).ordinal;
#ifdef DYNO_HAVE_CUDA
  const DeviceScope scope(ordinal, "loading the weights");
  return std::make_unique<CudaExecutor>(file, model, plan, device, pool, threads, lent);
#else
  throw DeviceError(str_cat("[cuda] device cuda:", ordinal, ": ", no_cuda_reason()));
#endif
}

}  // namespace

std::unique_ptr<Executor> make_cuda_executor(const GgufFile& file, const model::ModelDesc& model,
                                             const plan::Plan& plan, ThreadPool& pool, int threads,
                                             std::span<const std::byte* const> lent) {
  return make<Executor>(file, model, plan, plan::kMainDevice, pool, threads, lent);
}

std::unique_ptr<Backend> make_cuda_backend(const GgufFile& file, const model::ModelDesc& model, const plan::Plan& plan,
                                           plan::DeviceId device, ThreadPool& pool, int threads) {
  return make<Backend>(file, model, plan, device, pool, threads, {});
}

}  // namespace dyno::runtime
