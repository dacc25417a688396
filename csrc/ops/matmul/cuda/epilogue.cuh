// Computes y from sums: bias, activation or residual, one element at a time.
#pragma once

#include "device/arithmetic.cuh"
#include "ops/matmul/cuda/problem.h"

namespace dyno::ops::cuda {

__device__ __forceinline__ float activate(Activation activation, float gate, float up) {
  switch (activation) {
    case Activation::silu:
      return device::quotient(gate, 1.0f + expf(-gate)) * up;
    case Activation::gelu_tanh: {
      const float inner = 0.7978845608028654f * gate * (1.0f + 0.044715f * gate * gate);
      return 0.5f * gate * (1.0f + tanhf(inner)) * up;
    }
    case Activation::relu:
      return fmaxf(gate, 0.0f) * up;
    default: {
      const float limited = fminf(gate, 7.0f);
      return device::quotient(limited, 1.0f + expf(-1.702f * limited)) * (fminf(fmaxf(up, -7.0f), 7.0f) + 1.0f);
    }
  }
}

// `matrix`: index of the expert, or 0 if biases are not per matrix. `at`: index in y and residual.
__device__ __forceinline__ void store_product(const Problem& p, int64_t matrix, int row_of_w, int64_t at, float sum) {
  if (p.bias != nullptr) sum += p.bias[matrix * p.n + row_of_w];
  sum *= p.scale;
  if (p.residual != nullptr) sum += p.residual[at];
  p.y[at] = sum;
}
__device__ __forceinline__ void store_gated(const Problem& p, int64_t matrix, int row_of_w, int64_t at, float gate,
                                            float up) {
  if (p.bias != nullptr) gate += p.bias[matrix * p.n + row_of_w];
  if (p.bias_up != nullptr) up += p.bias_up[matrix * p.n + row_of_w];
  p.y[at] = activate(p.activation, gate, up);
}

}  // namespace dyno::ops::cuda
