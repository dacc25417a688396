// Rotary embedding. pairs: a thread rotates one pair of one head. tokens: a block rotates all heads of a token, and
// computes cosines and sines once.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/rope.cuh"
#include "ops/rope/kernels_cuda.h"

namespace dyno::ops {
namespace {

// The factor of cosines and sines at a position.
__device__ __forceinline__ float magnitude(const RopeArgs& args, int position) {
  if (args.position_scale == 0) return args.mscale;
  const auto steps = static_cast<float>(position / args.position_step);
  return args.mscale * fmaf(args.position_scale, log1pf(steps), 1.0f);
}

template <bool Neox>
__global__ void __launch_bounds__(256) rope_pairs(RopeArgs args, int heads, int head_dim, int half, int offset) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t token = blockIdx.x;
  const int index = blockIdx.y * blockDim.x + threadIdx.x;
  const int head = index / half, pair = index % half;
  if (head >= heads) return;
  const int position = args.positions[token];
  const float2 c = device::cos_sin(position, args.inv_freq[pair], magnitude(args, position));
  float* x = args.x + token * args.x_stride + int64_t{head} * head_dim + offset;
  float* first = Neox ? x + pair : x + 2 * pair;
  float* second = Neox ? x + half + pair : x + 2 * pair + 1;
  const float a = *first, b = *second;
  *first = a * c.x - b * c.y;
  *second = a * c.y + b * c.x;
}

__device__ __forceinline__ void rotate(float& a, float& b, float2 c) {
  const float was = a;
  a = was * c.x - b * c.y;
  b = was * c.y + b * c.x;
}

// kQuads: 16 bytes at a time, if rows and heads are aligned.
template <bool Neox, bool kQuads>
__global__ void __launch_bounds__(256) rope_tokens(RopeArgs args, int heads, int head_dim, int half, int offset) {
  extern __shared__ float2 turns[];  // [half]
  device::let_next_start();
  device::wait_for_previous();
  const int64_t token = blockIdx.x;
  const int position = args.positions[token];
  const float factor = magnitude(args, position);
  for (int pair = threadIdx.x; pair < half; pair += blockDim.x) {
    turns[pair] = device::cos_sin(position, args.inv_freq[pair], factor);
  }
  __syncthreads();  // turns are written
  float* row = args.x + token * args.x_stride + offset;
  constexpr int kPairs = !kQuads ? 1 : Neox ? 4 : 2;  // pairs that a thread rotates at once
  const int each = half / kPairs;
#pragma unroll 4
  for (int index = threadIdx.x; index < heads * each; index += blockDim.x) {
    const int pair = index % each * kPairs;
    float* x = row + int64_t{index / each} * head_dim + (Neox ? pair : 2 * pair);
    if constexpr (!kQuads) {
      rotate(x[0], x[Neox ? half : 1], turns[pair]);
    } else if constexpr (Neox) {
      float4 a = *reinterpret_cast<const float4*>(x), b = *reinterpret_cast<const float4*>(x + half);
      rotate(a.x, b.x, turns[pair]);
      rotate(a.y, b.y, turns[pair + 1]);
      rotate(a.z, b.z, turns[pair + 2]);
      rotate(a.w, b.w, turns[pair + 3]);
      *reinterpret_cast<float4*>(x) = a;
      *reinterpret_cast<float4*>(x + half) = b;
    } else {
      float4 both = *reinterpret_cast<const float4*>(x);
      rotate(both.x, both.y, turns[pair]);
      rotate(both.z, both.w, turns[pair + 1]);
      *reinterpret_cast<float4*>(x) = both;
    }
  }
}

}  // namespace

void rope_tokens_cuda(const RopeArgs& args, const RopeDesc& desc, int threads, CudaStream& stream) {
  const int half = static_cast<int>(desc.n_rot / 2);
  const bool quads = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && args.x_stride % 4 == 0 &&
                     desc.head_dim % 4 == 0 && desc.offset % 4 == 0 && half % 4 == 0;
  const auto kernel = desc.neox ? (quads ? rope_tokens<true, true> : rope_tokens<true, false>)
                                : (quads ? rope_tokens<false, true> : rope_tokens<false, false>);
  launch_dependent("rope", kernel, static_cast<unsigned>(desc.m), static_cast<unsigned>(threads),
                   static_cast<size_t>(half) * sizeof(float2), stream.handle, args, static_cast<int>(desc.heads),
                   static_cast<int>(desc.head_dim), half, static_cast<int>(desc.offset));
}

void rope_pairs_cuda(const RopeArgs& args, const RopeDesc& desc, int threads, CudaStream& stream) {
  const int half = static_cast<int>(desc.n_rot / 2);
  const auto blocks = static_cast<unsigned>((desc.heads * half + threads - 1) / threads);
  const dim3 grid(static_cast<unsigned>(desc.m), blocks);
  const auto kernel = desc.neox ? rope_pairs<true> : rope_pairs<false>;
  launch_dependent("rope", kernel, grid, static_cast<unsigned>(threads), 0, stream.handle, args,
                   static_cast<int>(desc.heads), static_cast<int>(desc.head_dim), half, static_cast<int>(desc.offset));
}

}  // namespace dyno::ops
