// The fields of family linear_attention, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/linear_attention/linear_attention.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<LinearAttentionDesc>, V&& v) {
  using D = LinearAttentionDesc;
  v("m", &D::m, In::never); v("k_heads", &D::k_heads, In::always); v("v_heads", &D::v_heads, In::always);
  v("dk", &D::dk, In::always); v("dv", &D::dv, In::always); v("rule", &D::rule, In::if_set);
  v("grouped", &D::grouped, In::if_set); v("channel_decay", &D::channel_decay, In::if_set);
}
// clang-format on

struct LinearAttentionOperands {
  Reads q, k, v, step;
  MayRead beta{};
  NeedsWeight decay, step_bias;
  MayUseWeight skip{};
  float eps = 0.0f;
  int32_t state_index = 0;
  Writes out;
};
DYNO_FIELDS(LinearAttentionOperands, q, k, v, step, beta, decay, step_bias, skip, eps, state_index, out)

DYNO_FIELDS(LinearAttentionArgs, q, q_stride, k, k_stride, v, v_stride, step, step_stride, beta, beta_stride, decay,
            step_bias, skip, eps, state, slot_positions, runs, n_runs, out, out_stride)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<LinearAttentionArgs>) {
  return {"state", "slot_positions", "runs", "n_runs"};
}

// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<LinearAttentionOperands>) { return {"state_index"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const LinearAttentionDesc& d, LinearAttentionArgs& a, Visitor& v) {
  const int64_t keys = d.k_heads * d.dk, values = d.v_heads * d.dv;
  const bool delta = d.rule == LinearRule::delta;
  v.runs(d.m, a);
  v.number("q_stride", a.q_stride, keys);
  v.number("k_stride", a.k_stride, keys);
  v.number("v_stride", a.v_stride, values);
  v.number("step_stride", a.step_stride, d.steps());
  v.number("beta_stride", a.beta_stride, d.v_heads);
  v.number("out_stride", a.out_stride, values);
  v.in("q", a.q, extent(d.m, a.q_stride, keys));
  v.in("k", a.k, extent(d.m, a.k_stride, keys));
  v.in("v", a.v, extent(d.m, a.v_stride, values));
  v.in("step", a.step, extent(d.m, a.step_stride, d.steps()));
  v.optional("beta", a.beta, extent(d.m, a.beta_stride, d.v_heads), delta);
  v.require(!delta || a.beta != nullptr, "beta");
  v.constants("decay", a.decay, d.v_heads, -0.1f);
  v.in("step_bias", a.step_bias, d.steps());
  v.optional("skip", a.skip, d.v_heads, !delta);
  v.require(delta || a.skip != nullptr, "skip");
  v.number("eps", a.eps, 0.0f, 1e-6f);
  v.state("state", a.state, d.state_elements());
  v.out("out", a.out, extent(d.m, a.out_stride, values));
}

}  // namespace dyno::ops
