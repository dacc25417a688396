// A short convolution: a thread for each channel of a run, its last inputs in registers.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/short_conv/short_conv.h"

namespace dyno::ops {
namespace {

template <int kTaps>
__global__ void __launch_bounds__(256) conv_threads(ShortConvArgs args, ShortConvDesc desc) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const SequenceRun run = args.runs[blockIdx.y];
  if (c >= desc.n || run.n_tokens == 0) return;
  float* state = args.state + run.slot * ((kTaps - 1) * desc.n) + c;
  float weights[kTaps], inputs[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) weights[j] = args.w[c * kTaps + j];
#pragma unroll
  for (int j = 0; j + 1 < kTaps; ++j) inputs[j] = run.position == 0 ? 0.0f : state[j * desc.n];
  const float bias = args.bias == nullptr ? 0.0f : args.bias[c];
  for (int64_t t = run.first_token; t < int64_t{run.first_token} + run.n_tokens; ++t) {
    float u = args.x[t * args.x_stride + c];
    if (desc.gated) u *= args.before[t * args.before_stride + c];
    inputs[kTaps - 1] = u;
    float sum = bias;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) sum += weights[j] * inputs[j];
    if (desc.silu) sum = sum / (1.0f + expf(-sum));
    if (desc.gated) sum *= args.after[t * args.after_stride + c];
    args.y[t * args.y_stride + c] = sum;
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) inputs[j] = inputs[j + 1];
  }
#pragma unroll
  for (int j = 0; j + 1 < kTaps; ++j) state[j * desc.n] = inputs[j];
}

}  // namespace

void short_conv_cuda(const ShortConvArgs& args, const ShortConvDesc& desc, int threads, CudaStream& stream) {
  if (args.n_runs == 0) return;
  const dim3 grid(static_cast<unsigned>((desc.n + threads - 1) / threads), static_cast<unsigned>(args.n_runs));
  const auto go = [&](auto kernel) {
    launch_dependent("short_conv", kernel, grid, static_cast<unsigned>(threads), 0, stream.handle, args, desc);
  };
  switch (desc.taps) {
    case 2:
      return go(conv_threads<2>);
    case 3:
      return go(conv_threads<3>);
    case 4:
      return go(conv_threads<4>);
    case 5:
      return go(conv_threads<5>);
    case 6:
      return go(conv_threads<6>);
    case 7:
      return go(conv_threads<7>);
    default:
      return go(conv_threads<8>);
  }
}

}  // namespace dyno::ops
