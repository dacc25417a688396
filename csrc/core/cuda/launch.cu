#include "core/cuda/launch.h"

#include <array>
#include <atomic>

namespace dyno {
namespace {

// Compiled like every other kernel of this library, so its target architecture is the target of all of them.
__global__ void probe() {}

}  // namespace

bool has_dependent_launch() {
  // Known for each device after the first launch: 0 unknown, 1 no, 2 yes.
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  DYNO_CUDA_CHECK(cudaGetDevice(&device));
  std::atomic<int>* slot = device < static_cast<int>(known.size()) ? &known[static_cast<size_t>(device)] : nullptr;
  const int before = slot == nullptr ? 0 : slot->load(std::memory_order_relaxed);
  if (before != 0) return before == 2;
  cudaFuncAttributes attributes{};
  DYNO_CUDA_CHECK(cudaFuncGetAttributes(&attributes, probe));
  const bool yes = attributes.ptxVersion >= 90;
  if (slot != nullptr) slot->store(yes ? 2 : 1, std::memory_order_relaxed);
  return yes;
}

}  // namespace dyno
