#include "core/cuda/launch.h"

#include <array>
#include <atomic>

#include "core/cuda/common_shared.h"

namespace dyno {
namespace {

// Compiled like every other kernel of this library, so its target architecture is the target of all of them.
__global__ void probe() {}

// Of a multiprocessor's largest size. No other of eight percentages helped all of five models on an H200
// (benchmarks/results/h200_shared_memory.json).
constexpr int kCommonSharedPercent = 58;

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

void prefer_common_shared_memory(const void* kernel) {
  if (!has_dependent_launch()) return;
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kCommonSharedPercent));
}

}  // namespace dyno
