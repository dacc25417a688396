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
  v("experts", &D::experts, In::always); v("used", &D::used, In::always); v("shared", &D::shared, In::if_set);
  v("layout", &D::layout, In::if_set);
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
  MayRead shared_x{};
  MayUseWeight shared_w{};
};
DYNO_FIELDS(MoeDownSumOperands, x, w, bias, ids, weights, residual, scale, out, shared_x, shared_w)

DYNO_FIELDS(MoeDownSumArgs, x, w, w_expert_stride_bytes, bias, ids, weights, residual, scale, settled, shared_x,
            shared_w, out)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<MoeDownSumArgs>) { return {"settled"}; }

// Names and sizes of a single launch's arguments.
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
  if (d.shared > 0) {
    v.in("shared_x", a.shared_x, d.m * d.shared);
    v.bytes("shared_w", a.shared_w, static_cast<int64_t>(layout_bytes(d.type, d.layout, d.n, d.shared)));
  }
  v.out("out", a.out, d.m * d.n);
}

}  // namespace dyno::ops
