// Linear attention token by token: a block holds some columns of a head's state in shared memory, a warp takes four of
// them, and its lanes share the dk rows.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/reduce.cuh"
#include "ops/linear_attention/linear_attention.h"

namespace dyno::ops {
namespace {

constexpr int kPerWarp = 4;  // columns

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__global__ void __launch_bounds__(256) recurrent_columns(LinearAttentionArgs args, LinearAttentionDesc d, int columns) {
  device::let_next_start();
  device::wait_for_previous();
  extern __shared__ float memory[];
  const int dk = static_cast<int>(d.dk), dv = static_cast<int>(d.dv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* q = memory;           // [dk]
  float* k = q + dk;           // [dk]
  float* decays = k + dk;      // [dk]
  float* state = decays + dk;  // [columns, dk]
  const int head = blockIdx.y, first = blockIdx.x * columns + warp * kPerWarp;
  const SequenceRun run = args.runs[blockIdx.z];
  if (run.n_tokens == 0) return;
  const bool delta = d.rule == LinearRule::delta;
  const int key_head = static_cast<int>(d.grouped ? head / (d.v_heads / d.k_heads) : head % d.k_heads);
  float* kept = args.state + (int64_t{run.slot} * d.v_heads + head) * dk * dv;
  float* own = state + warp * kPerWarp * dk;
  for (int c = 0; c < kPerWarp; ++c) {
    for (int i = lane; i < dk; i += 32) {
      own[c * dk + i] = run.position == 0 || first + c >= dv ? 0.0f : kept[int64_t{i} * dv + first + c];
    }
  }
  const int steps = d.channel_decay ? dk : 1;
  for (int64_t t = run.first_token; t < int64_t{run.first_token} + run.n_tokens; ++t) {
    __syncthreads();  // q, k and decays of the token before have been read
    const float* q_row = args.q + t * args.q_stride + int64_t{key_head} * dk;
    const float* k_row = args.k + t * args.k_stride + int64_t{key_head} * dk;
    const float* step = args.step + t * args.step_stride + int64_t{head} * steps;
    const float* bias = args.step_bias + int64_t{head} * steps;
    // Every warp finds the lengths, so that none waits for another.
    float q_sum = 0, k_sum = 0;
    for (int i = lane; i < dk; i += 32) {
      q_sum += q_row[i] * q_row[i];
      k_sum += k_row[i] * k_row[i];
    }
    const float q_scale =
        delta ? 1.0f / sqrtf(device::warp_sum(q_sum) + args.eps) / sqrtf(static_cast<float>(dk)) : 1.0f;
    const float k_scale = delta ? 1.0f / sqrtf(device::warp_sum(k_sum) + args.eps) : 1.0f;
    for (int i = threadIdx.x; i < dk; i += blockDim.x) {
      q[i] = q_row[i] * q_scale;
      k[i] = k_row[i] * k_scale;
      const int at = d.channel_decay ? i : 0;
      decays[i] = expf(args.decay[head] * softplus(step[at] + bias[at]));
    }
    __syncthreads();  // they are written
    const float factor =
        delta ? 1.0f / (1.0f + expf(-args.beta[t * args.beta_stride + head])) : softplus(step[0] + bias[0]);
    for (int c = 0; c < kPerWarp; ++c) {
      const int column = first + c;
      if (column >= dv) break;
      float* s = own + c * dk;
      const float v = args.v[t * args.v_stride + int64_t{head} * dv + column];
      float u = v;
      if (delta) {
        float known = 0;
        for (int i = lane; i < dk; i += 32) known += k[i] * decays[i] * s[i];
        u -= device::warp_sum(known);
      }
      u *= factor;
      float sum = 0;
      for (int i = lane; i < dk; i += 32) {
        const float next = decays[i] * s[i] + k[i] * u;
        s[i] = next;
        sum += q[i] * next;
      }
      sum = device::warp_sum(sum);
      if (lane == 0) {
        args.out[t * args.out_stride + int64_t{head} * dv + column] = sum + (delta ? 0.0f : args.skip[head] * v);
      }
    }
  }
  for (int c = 0; c < kPerWarp && first + c < dv; ++c) {
    for (int i = lane; i < dk; i += 32) kept[int64_t{i} * dv + first + c] = own[c * dk + i];
  }
}

}  // namespace

void linear_attention_cuda(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, int columns,
                           CudaStream& stream) {
  if (args.n_runs == 0) return;
  const size_t shared = static_cast<size_t>(desc.dk * (3 + columns)) * sizeof(float);
  const dim3 grid(static_cast<unsigned>((desc.dv + columns - 1) / columns), static_cast<unsigned>(desc.v_heads),
                  static_cast<unsigned>(args.n_runs));
  launch_dependent("linear_attention", recurrent_columns, grid, static_cast<unsigned>(columns / kPerWarp * 32), shared,
                   stream.handle, args, desc, columns);
}

}  // namespace dyno::ops
