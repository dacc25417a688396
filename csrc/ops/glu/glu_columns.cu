// y = activation(gate) * up, a thread for each element.
#include <cuda_runtime.h>

#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/glu/kernels_cuda.h"

namespace dyno::ops {
namespace {

__device__ __forceinline__ float activate(Activation activation, float gate, float up) {
  switch (activation) {
    case Activation::silu:
      return gate / (1.0f + expf(-gate)) * up;
    case Activation::gelu_tanh: {
      const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
      return 0.5f * gate * (1.0f + tanhf(inner)) * up;
    }
    default: {  // swiglu_oai
      const float limited = fminf(gate, 7.0f);
      return limited / (1.0f + expf(-1.702f * limited)) * (fminf(fmaxf(up, -7.0f), 7.0f) + 1.0f);
    }
  }
}

__global__ void __launch_bounds__(256) glu_columns(GluArgs args, int64_t n, Activation activation) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t row = blockIdx.x, i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  args.y[row * args.y_stride + i] =
      activate(activation, args.gate[row * args.gate_stride + i], args.up[row * args.up_stride + i]);
}

}  // namespace

void glu_columns_cuda(const GluArgs& args, const GluDesc& desc, int threads, CudaStream& stream) {
  const dim3 grid(static_cast<unsigned>(desc.m), static_cast<unsigned>((desc.n + threads - 1) / threads));
  launch_dependent("glu", glu_columns, grid, static_cast<unsigned>(threads), 0, stream.handle, args, desc.n,
                   desc.activation);
}

}  // namespace dyno::ops
