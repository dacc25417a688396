// Copies rows of f32 from one stride to another, one thread per element.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/copy/kernels_cuda.h"

namespace dyno::ops {
namespace {

__global__ void __launch_bounds__(256) copy_columns(CopyArgs args, int64_t rows, int k) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t row = index / k, i = index % k;
  if (row >= rows) return;
  auto* out = reinterpret_cast<float*>(static_cast<uint8_t*>(args.out) + row * args.out_stride_bytes);
  out[i] = args.x[row * args.x_stride + i];
}

}  // namespace

void copy_columns_cuda(const CopyArgs& args, const CopyDesc& desc, int threads, CudaStream& stream) {
  const auto blocks = static_cast<unsigned>((desc.m * desc.k + threads - 1) / threads);
  launch_dependent("copy", copy_columns, blocks, static_cast<unsigned>(threads), 0, stream.handle, args, desc.m,
                   static_cast<int>(desc.k));
}

}  // namespace dyno::ops
