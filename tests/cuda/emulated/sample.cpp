// The CUDA kernel that draws tokens as a function that a test calls on the CPU.
#include <cuda_runtime.h>

using std::isnan;

#include "ops/sample/sample_blocks.cu"

using namespace dyno::ops;

extern "C" void run_backwards(int backwards) { emulated::backwards = backwards != 0; }

// One row of `n` logits by `blocks` blocks. Fails if memory behind its own was written.
extern "C" int32_t draw(const float* logits, int64_t n, const SampleSettings* settings, float uniform, int finite_only,
                        int blocks, int sorts) {
  const SampleDesc desc{.m = 1, .n_vocab = n};
  std::vector<std::byte> workspace(sample_blocks_scratch(desc, blocks, sorts != 0) + 64, std::byte{0x5a});
  int32_t counter = 0, token = -7;
  CudaStream stream{.workspace = workspace.data(), .counters = &counter};
  sample_blocks_cuda(
      {.logits = logits, .uniform = &uniform, .row_settings = settings, .finite_only = finite_only != 0, .out = &token},
      desc, blocks, sorts != 0, stream);
  for (size_t i = workspace.size() - 64; i < workspace.size(); ++i) {
    if (workspace[i] != std::byte{0x5a}) return -8;
  }
  return counter == 0 ? token : -9;
}
