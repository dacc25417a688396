#include "ops/linear_attention/prepare.h"

#include <algorithm>
#include <cmath>

namespace dyno::ops {
namespace {

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

float scaled_length(const float* x, int64_t n, float eps) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum + eps);
}

}  // namespace

LinearTokens prepare_tokens(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, int64_t first,
                            int64_t count, int64_t head, int64_t slot, float* memory) {
  const int64_t dk = desc.dk, dv = desc.dv;
  const bool delta = desc.rule == LinearRule::delta;
  const int64_t key_head = desc.grouped ? head / (desc.v_heads / desc.k_heads) : head % desc.k_heads;
  LinearTokens x{.count = count,
                 .dk = dk,
                 .dv = dv,
                 .q = memory,
                 .k = memory + count * dk,
                 .step = memory + 2 * count * dk,
                 .log_decay = memory + 2 * count * dk + count,
                 .channel_decay = desc.channel_decay,
                 .delta = delta,
                 .skip = delta ? 0.0f : args.skip[head],
                 .v = args.v + first * args.v_stride + head * dv,
                 .v_stride = args.v_stride,
                 .out = args.out + first * args.out_stride + head * dv,
                 .out_stride = args.out_stride,
                 .state = args.state + slot * desc.state_elements() + head * dk * dv};
  const float per_query = delta ? 1.0f / std::sqrt(static_cast<float>(dk)) : 1.0f;
  const int64_t steps = desc.channel_decay ? dk : 1;
  for (int64_t t = 0; t < count; ++t) {
    const float* q = args.q + (first + t) * args.q_stride + key_head * dk;
    const float* k = args.k + (first + t) * args.k_stride + key_head * dk;
    const float q_scale = delta ? per_query * scaled_length(q, dk, args.eps) : 1.0f;
    const float k_scale = delta ? scaled_length(k, dk, args.eps) : 1.0f;
    std::transform(q, q + dk, x.q + t * dk, [=](float v) { return v * q_scale; });
    std::transform(k, k + dk, x.k + t * dk, [=](float v) { return v * k_scale; });
    const float* step = args.step + (first + t) * args.step_stride + head * steps;
    const float* bias = args.step_bias + head * steps;
    for (int64_t i = 0; i < steps; ++i) x.log_decay[t * steps + i] = args.decay[head] * softplus(step[i] + bias[i]);
    x.step[t] = delta ? 1.0f / (1.0f + std::exp(-args.beta[(first + t) * args.beta_stride + head]))
                      : softplus(step[0] + bias[0]);
  }
  return x;
}

}  // namespace dyno::ops
