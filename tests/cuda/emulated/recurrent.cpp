// The CUDA kernels with recurrent state as functions that a test calls on the CPU.
#include <cuda_runtime.h>

namespace dyno::ops {
namespace {
thread_local float4 shared[1 << 15];  // of chunks.cu
}
}  // namespace dyno::ops

#include "ops/linear_attention/chunks.cu"
#include "ops/linear_attention/tokens.cu"
#include "ops/short_conv/conv_threads.cu"

using namespace dyno::ops;

// Which thread of a block runs first: the first one, or the last one.
extern "C" void run_backwards(int backwards) { emulated::backwards = backwards != 0; }

// numbers: m, k_heads, v_heads, dk, dv, additive, grouped, channel_decay, row (between tokens of q, k and v),
// out_stride, runs. inputs: q, k, v, step, beta, decay, step_bias, skip.
extern "C" void linear_attention(int chunks, const int64_t* numbers, const float* const* inputs, float eps,
                                 const SequenceRun* runs, float* state, float* out) {
  const LinearAttentionDesc desc{.m = numbers[0],
                                 .k_heads = numbers[1],
                                 .v_heads = numbers[2],
                                 .dk = numbers[3],
                                 .dv = numbers[4],
                                 .rule = numbers[5] != 0 ? LinearRule::additive : LinearRule::delta,
                                 .grouped = numbers[6] != 0,
                                 .channel_decay = numbers[7] != 0};
  LinearAttentionArgs args;
  args.q = inputs[0], args.k = inputs[1], args.v = inputs[2];
  args.q_stride = args.k_stride = args.v_stride = numbers[8];
  args.step = inputs[3], args.step_stride = desc.steps();
  args.beta = inputs[4], args.beta_stride = desc.v_heads;
  args.decay = inputs[5], args.step_bias = inputs[6], args.skip = inputs[7];
  args.eps = eps;
  args.state = state;
  args.runs = runs, args.n_runs = static_cast<int32_t>(numbers[10]);
  args.out = out, args.out_stride = numbers[9];
  CudaStream stream{};
  (chunks != 0 ? linear_attention_chunks : linear_attention_tokens)(args, desc, stream);
}

// numbers: m, n, taps, silu, gated, x_stride, y_stride, runs. inputs: x, before, after, w, bias.
extern "C" void short_conv(int threads, const int64_t* numbers, const float* const* inputs, const SequenceRun* runs,
                           float* state, float* y) {
  const ShortConvDesc desc{
      .m = numbers[0], .n = numbers[1], .taps = numbers[2], .silu = numbers[3] != 0, .gated = numbers[4] != 0};
  ShortConvArgs args;
  args.x = inputs[0], args.x_stride = numbers[5];
  args.before = inputs[1], args.after = inputs[2];
  args.before_stride = args.after_stride = desc.n;
  args.w = inputs[3], args.bias = inputs[4];
  args.state = state;
  args.runs = runs, args.n_runs = static_cast<int32_t>(numbers[7]);
  args.y = y, args.y_stride = numbers[6];
  CudaStream stream{};
  short_conv_cuda(args, desc, threads, stream);
}
