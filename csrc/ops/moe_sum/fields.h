// The fields of family moe_sum, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/moe_sum/moe_sum.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<MoeSumDesc>, V&& v) {
  using D = MoeSumDesc;
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("used", &D::used, In::always);
}
// clang-format on

struct MoeSumOperands {
  Reads x;
  MayRead other_x{}, other_ids{};
  MayRead weights{}, residual{};
  float scale = 1.0f;
  Writes out;
};
DYNO_FIELDS(MoeSumOperands, x, other_x, other_ids, weights, residual, scale, out)

DYNO_FIELDS(MoeSumArgs, x, other_x, other_ids, weights, residual, scale, out)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const MoeSumDesc& d, MoeSumArgs& a, Visitor& v) {
  v.in("x", a.x, d.m * d.used * d.n);
  v.optional("other_x", a.other_x, d.m * d.used * d.n, false);
  v.optional("other_ids", a.other_ids, d.m * d.used, false);
  v.optional("weights", a.weights, d.m * d.used, true);
  v.optional("residual", a.residual, d.m * d.n, true);
  v.number("scale", a.scale, 1.0f);
  v.out("out", a.out, d.m * d.n);
}

}  // namespace dyno::ops
