// Computes rows of y from sums in scratch. Writes only existing columns.
#include "ops/matmul/kernels.h"
#include "ops/matmul/vector_math.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

template <bool kBias, bool kResidual>
void linear_row(const LinearEpilogue& e, int t) {
  const float* c = e.c + t * e.ldc;
  const float* residual = kResidual ? e.residual[t] : nullptr;
  const F scale = f_set1(e.scale);
  float* y = e.y[t];
  int i = 0;
  for (; i + 16 <= e.columns; i += 16) {
    F v = f_load(c + i);
    if constexpr (kBias) v = f_add(v, f_load(e.bias + i));
    v = kResidual ? f_fma(v, scale, f_load(residual + i)) : f_mul(v, scale);
    f_store(y + i, v);
  }
  if (i < e.columns) {
    const int n = e.columns - i;
    F v = f_load_n(c + i, n);
    if constexpr (kBias) v = f_add(v, f_load_n(e.bias + i, n));
    v = kResidual ? f_fma(v, scale, f_load_n(residual + i, n)) : f_mul(v, scale);
    f_store_n(y + i, v, n);
  }
}

template <Activation kActivation>
void gate_row(const GateEpilogue& e, int t) {
  const float* gate = e.gate + t * e.ldc;
  const float* up = e.up + t * e.ldc;
  const F scale_gate = f_set1(e.scale_gate), scale_up = f_set1(e.scale_up);
  float* y = e.y[t];
  for (int i = 0; i < e.columns; i += 16) {
    const int n = e.columns - i < 16 ? e.columns - i : 16;
    F g = f_mul(f_load_n(gate + i, n), scale_gate), u = f_mul(f_load_n(up + i, n), scale_up);
    if (e.bias_gate != nullptr) g = f_add(g, f_load_n(e.bias_gate + i, n));
    if (e.bias_up != nullptr) u = f_add(u, f_load_n(e.bias_up + i, n));
    f_store_n(y + i, v_gate<kActivation>(g, u), n);
  }
}

}  // namespace

void epilogue_linear(const LinearEpilogue& e) {
  for (int t = 0; t < e.m; ++t) {
    if (e.residual != nullptr) {
      e.bias != nullptr ? linear_row<true, true>(e, t) : linear_row<false, true>(e, t);
    } else {
      e.bias != nullptr ? linear_row<true, false>(e, t) : linear_row<false, false>(e, t);
    }
  }
}

void epilogue_gate(const GateEpilogue& e) {
  for (int t = 0; t < e.m; ++t) {
    switch (e.activation) {
      case Activation::silu:
        gate_row<Activation::silu>(e, t);
        break;
      case Activation::gelu_tanh:
        gate_row<Activation::gelu_tanh>(e, t);
        break;
      case Activation::swiglu_oai:
        gate_row<Activation::swiglu_oai>(e, t);
        break;
      case Activation::relu:
        gate_row<Activation::relu>(e, t);
        break;
    }
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
