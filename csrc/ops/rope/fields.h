// The fields of family rope, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/rope/rope.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<RopeDesc>, V&& v) {
  using D = RopeDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("head_dim", &D::head_dim, In::always);
  v("n_rot", &D::n_rot, In::always); v("offset", &D::offset, In::if_set); v("neox", &D::neox, In::if_set);
}
// clang-format on

struct RopeOperands {
  Updates x;
  int32_t rope_table = 0;
};
DYNO_FIELDS(RopeOperands, x, rope_table)

DYNO_FIELDS(RopeArgs, x, x_stride, positions, inv_freq, mscale, position_scale, position_step)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<RopeArgs>) {
  return {"positions", "inv_freq", "mscale", "position_scale", "position_step"};
}
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<RopeOperands>) { return {"rope_table"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const RopeDesc& d, RopeArgs& a, Visitor& v) {
  const int64_t row = d.heads * d.head_dim;
  v.number("x_stride", a.x_stride, row);
  v.out("x", a.x, extent(d.m, a.x_stride, row));
  v.integers("positions", a.positions, d.m, 4096);
  v.in("inv_freq", a.inv_freq, d.n_rot / 2);
  v.number("mscale", a.mscale, 1.0f);
  v.number("position_scale", a.position_scale, 0.0f);
  v.number("position_step", a.position_step, int64_t{1});
}

}  // namespace dyno::ops
