// y = x * sigmoid(gate), one thread per element.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/sigmoid_gate/sigmoid_gate.h"

namespace dyno::ops {
namespace {

__global__ void __launch_bounds__(256) sigmoid_gate_columns(SigmoidGateArgs args, int64_t n, int64_t width) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t row = blockIdx.x, i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float gate = args.gate[row * args.gate_stride + i / width];
  args.y[row * args.y_stride + i] = args.x[row * args.x_stride + i] * (1.0f / (1.0f + expf(-gate)));
}

}  // namespace

void sigmoid_gate_columns_cuda(const SigmoidGateArgs& args, const SigmoidGateDesc& desc, int threads,
                               CudaStream& stream) {
  const dim3 grid(static_cast<unsigned>(desc.m), static_cast<unsigned>((desc.n + threads - 1) / threads));
  launch_dependent("sigmoid_gate", sigmoid_gate_columns, grid, static_cast<unsigned>(threads), 0, stream.handle, args,
                   desc.n, desc.n / desc.gates);
}

}  // namespace dyno::ops
