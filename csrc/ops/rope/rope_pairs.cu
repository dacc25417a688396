// Rotary embedding: a thread rotates one pair of one head.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "device/rope.cuh"
#include "ops/rope/kernels_cuda.h"

namespace dyno::ops {
namespace {

template <bool Neox>
__global__ void __launch_bounds__(256) rope_pairs(RopeArgs args, int heads, int head_dim, int half, int offset) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t token = blockIdx.x;
  const int index = blockIdx.y * blockDim.x + threadIdx.x;
  const int head = index / half, pair = index % half;
  if (head >= heads) return;
  const float2 c = device::cos_sin(args.positions[token], args.inv_freq[pair], args.mscale);
  float* x = args.x + token * args.x_stride + int64_t{head} * head_dim + offset;
  float* first = Neox ? x + pair : x + 2 * pair;
  float* second = Neox ? x + half + pair : x + 2 * pair + 1;
  const float a = *first, b = *second;
  *first = a * c.x - b * c.y;
  *second = a * c.y + b * c.x;
}

}  // namespace

void rope_pairs_cuda(const RopeArgs& args, const RopeDesc& desc, int threads, CudaStream& stream) {
  const int half = static_cast<int>(desc.n_rot / 2);
  const auto blocks = static_cast<unsigned>((desc.heads * half + threads - 1) / threads);
  const dim3 grid(static_cast<unsigned>(desc.m), blocks);
  const auto kernel = desc.neox ? rope_pairs<true> : rope_pairs<false>;
  launch_dependent("rope", kernel, grid, static_cast<unsigned>(threads), 0, stream.handle, args,
                   static_cast<int>(desc.heads), static_cast<int>(desc.head_dim), half, static_cast<int>(desc.offset));
}

}  // namespace dyno::ops
