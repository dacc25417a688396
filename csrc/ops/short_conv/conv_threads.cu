// A short convolution: one thread per channel and strip of a run's tokens.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/short_conv/short_conv.h"

namespace dyno::ops {
namespace {

constexpr int kTogether = 8;  // tokens whose inputs a thread loads before the first use

// Tokens [begin, end) of a run.
struct Strip {
  SequenceRun run{};
  int begin = 0, end = 0;
};

// Strips of `length` tokens: first the first strip of each run, then the other strips of all runs in order.
__device__ __forceinline__ Strip strip_of(const ShortConvArgs& args, int64_t number, int length) {
  Strip out;
  if (number < args.n_runs) {
    out.run = args.runs[number];
    out.end = min(length, out.run.n_tokens);
    return out;
  }
  number -= args.n_runs;
  for (int r = 0; r < args.n_runs; ++r) {
    const int tokens = args.runs[r].n_tokens, others = tokens > 0 ? (tokens - 1) / length : 0;
    if (number < others) {
      out.run = args.runs[r];
      out.begin = static_cast<int>(number + 1) * length, out.end = min(out.begin + length, tokens);
      return out;
    }
    number -= others;
  }
  return out;
}

template <int kTaps>
__device__ __forceinline__ void convolve(const ShortConvArgs& args, const ShortConvDesc& desc, int64_t c,
                                         const Strip& strip) {
  const SequenceRun run = strip.run;
  const int begin = strip.begin, end = strip.end;
  float* state = args.state + run.slot * ((kTaps - 1) * desc.n) + c;
  float weights[kTaps], inputs[kTaps - 1 + kTogether];
  const auto input = [&](int t) {
    const int64_t row = int64_t{run.first_token} + t;
    const float u = args.x[row * args.x_stride + c];
    return desc.gated ? u * args.before[row * args.before_stride + c] : u;
  };
  // The input `back` tokens before the run's first token.
  const auto kept = [&](int back) { return run.position == 0 ? 0.0f : state[(kTaps - 1 - back) * desc.n]; };
#pragma unroll
  for (int j = 0; j < kTaps; ++j) weights[j] = args.w[c * kTaps + j];
#pragma unroll
  for (int j = 0; j + 1 < kTaps; ++j) {
    const int t = begin + j - (kTaps - 1);
    inputs[j] = t < 0 ? kept(-t) : input(t);
  }
  if (begin == 0) {
    // The thread that reads the old state writes the new one; threads of other strips read only x.
    float last[kTaps - 1];
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) {
      const int t = run.n_tokens + j - (kTaps - 1);
      last[j] = t < 0 ? kept(-t) : input(t);
    }
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) state[j * desc.n] = last[j];
  }
  const float bias = args.bias == nullptr ? 0.0f : args.bias[c];
  for (int t = begin; t < end; t += kTogether) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (t + i < end) inputs[kTaps - 1 + i] = input(t + i);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (t + i >= end) break;
      float sum = bias;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) sum += weights[j] * inputs[i + j];
      if (desc.silu) sum = sum / (1.0f + expf(-sum));
      const int64_t row = int64_t{run.first_token} + t + i;
      if (desc.gated) sum *= args.after[row * args.after_stride + c];
      args.y[row * args.y_stride + c] = sum;
    }
#pragma unroll
    for (int j = 0; j + 1 < kTaps; ++j) inputs[j] = inputs[j + kTogether];
  }
}

// Blocks cover channels and, with stride gridDim.y, `strips` strips, the last of which may not exist.
template <int kTaps>
__global__ void __launch_bounds__(256)
    conv_threads(ShortConvArgs args, ShortConvDesc desc, int64_t strips, int length) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= desc.n) return;
  for (int64_t number = blockIdx.y; number < strips; number += gridDim.y) {
    const Strip strip = strip_of(args, number, length);
    if (strip.begin < strip.end) convolve<kTaps>(args, desc, c, strip);
  }
}

}  // namespace

void short_conv_cuda(const ShortConvArgs& args, const ShortConvDesc& desc, int threads, CudaStream& stream) {
  if (args.n_runs == 0) return;
  // Longer strips read fewer inputs twice; shorter strips fill the device at a few hundred tokens.
  const int length = desc.m >= 2048 ? 64 : 16;
  constexpr int64_t kMostBlocks = 65535;  // maximum of that grid dimension
  const int64_t strips = args.n_runs + desc.m / length;
  const dim3 grid(static_cast<unsigned>((desc.n + threads - 1) / threads),
                  static_cast<unsigned>(std::min(strips, kMostBlocks)));
  const auto go = [&](auto kernel) {
    launch_dependent("short_conv", kernel, grid, static_cast<unsigned>(threads), 0, stream.handle, args, desc, strips,
                     length);
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
