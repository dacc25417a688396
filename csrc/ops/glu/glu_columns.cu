// y = activation(gate) * up, one thread per element.
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
    case Activation::relu:
      return fmaxf(gate, 0.0f) * up;
    default: {  // swiglu_oai
      const float limited = fminf(gate, 7.0f);
      return limited / (1.0f + expf(-1.702f * limited)) * (fminf(fmaxf(up, -7.0f), 7.0f) + 1.0f);
    }
  }
}

// `width`: columns per slot.
__global__ void __launch_bounds__(256) glu_columns(GluArgs args, int64_t n, int64_t width, Activation activation) {
  device::let_next_start();
  device::wait_for_previous();
  const int64_t row = blockIdx.x, i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float gate = args.gate[row * args.gate_stride + i], up = args.up[row * args.up_stride + i];
  if (args.ids != nullptr) {
    const int32_t expert = args.ids[row * (n / width) + i / width];
    if (args.gate_scale != nullptr) gate *= args.gate_scale[expert];
    if (args.up_scale != nullptr) up *= args.up_scale[expert];
  }
  args.y[row * args.y_stride + i] = activate(activation, gate, up);
}

}  // namespace

void glu_columns_cuda(const GluArgs& args, const GluDesc& desc, int threads, CudaStream& stream) {
  const dim3 grid(static_cast<unsigned>(desc.m), static_cast<unsigned>((desc.n + threads - 1) / threads));
  launch_dependent("glu", glu_columns, grid, static_cast<unsigned>(threads), 0, stream.handle, args, desc.n,
                   desc.n / desc.used, desc.activation);
}

}  // namespace dyno::ops
