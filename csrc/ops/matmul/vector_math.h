// exp and the gated activations on 16 lanes. Kernel sources only.
#pragma once

#include "ops/matmul/simd.h"
#include "ops/op.h"

namespace DYNO_KERNEL_NAMESPACE {

// e^x with a relative error below 2e-7; saturates at about 2^-126 and at infinity. x = n ln 2 + r, |r| <= ln 2 / 2;
// ln 2 in two parts so that r is exact; Taylor polynomial of degree 7.
inline F v_exp(F x) {
  x = f_max(f_set1(-87.0f), f_min(f_set1(89.0f), x));
  const F n = f_round(f_mul(x, f_set1(1.44269504088896341f)));
  F r = f_fnma(n, f_set1(0.693145751953125f), x);
  r = f_fnma(n, f_set1(1.42860682030941723e-6f), r);
  F p = f_set1(1.98412698e-4f);
  p = f_fma(p, r, f_set1(1.38888889e-3f));
  p = f_fma(p, r, f_set1(8.33333333e-3f));
  p = f_fma(p, r, f_set1(4.16666667e-2f));
  p = f_fma(p, r, f_set1(1.66666667e-1f));
  p = f_fma(p, r, f_set1(0.5f));
  p = f_fma(p, r, f_set1(1.0f));
  p = f_fma(p, r, f_set1(1.0f));
  return f_mul(p, f_exp2i(n));
}

// x / (1 + e^-z)
inline F v_times_sigmoid(F x, F z) { return f_div(x, f_add(f_set1(1.0f), v_exp(f_sub(f_zero(), z)))); }

template <Activation kActivation>
inline F v_gate(F gate, F up) {
  if constexpr (kActivation == Activation::silu) {
    return f_mul(v_times_sigmoid(gate, gate), up);
  } else if constexpr (kActivation == Activation::gelu_tanh) {
    // 0.5 x (1 + tanh u) = x / (1 + e^-2u), which keeps precision for negative x.
    const F cubic = f_fma(f_mul(f_mul(gate, gate), gate), f_set1(0.044715f), gate);
    return f_mul(v_times_sigmoid(gate, f_mul(cubic, f_set1(1.5957691216057308f))), up);
  } else if constexpr (kActivation == Activation::relu) {
    return f_mul(f_max(f_zero(), gate), up);
  } else {
    const F g = f_min(f_set1(7.0f), gate);
    const F u = f_max(f_set1(-7.0f), f_min(f_set1(7.0f), up));
    return f_mul(v_times_sigmoid(g, f_mul(g, f_set1(1.702f))), f_add(u, f_set1(1.0f)));
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
