// The fields of family moe_down_sum, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/moe_down_sum/moe_down_sum.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<MoeDownSumDesc>, V&& v) {
  using D = MoeDownSumDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always); v("layout", &D::layout, In::if_set);
}
// clang-format on

struct MoeDownSumOperands {
  Reads x;
  NeedsWeight w;
  MayUseWeight bias{};
  Reads ids, weights;
  MayRead residual{};
  float scale = 1.0f;
  Writes out;
};
DYNO_FIELDS(MoeDownSumOperands, x, w, bias, ids, weights, residual, scale, out)

DYNO_FIELDS(MoeDownSumArgs, x, w, w_expert_stride_bytes, bias, ids, weights, residual, scale, settled, out)
// Given by the u-batch.
constexpr FieldNames from_batch(std::type_identity<MoeDownSumArgs>) { return {"settled"}; }

// The arguments of a launch by itself: what they are called, and how far they reach.
template <typename Visitor>
void arguments(const MoeDownSumDesc& d, MoeDownSumArgs& a, Visitor& v) {
  v.in("x", a.x, d.m * d.used * d.k);
  v.number("w_expert_stride_bytes", a.w_expert_stride_bytes, matrix_bytes(d));
  v.bytes("w", a.w, extent(d.experts, a.w_expert_stride_bytes, matrix_bytes(d)));
  v.optional("bias", a.bias, d.experts * d.n, false);
  v.routing("ids", a.ids, d.m, d.used, d.experts);
  v.in("weights", a.weights, d.m * d.used);
  v.optional("residual", a.residual, d.m * d.n, true);
  v.number("scale", a.scale, 1.0f);
  v.number("settled", a.settled, false, true);
  v.out("out", a.out, d.m * d.n);
}

}  // namespace dyno::ops
