// The fields of family short_conv, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/short_conv/short_conv.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<ShortConvDesc>, V&& v) {
  using D = ShortConvDesc;
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("taps", &D::taps, In::always);
  v("silu", &D::silu, In::if_set); v("gated", &D::gated, In::if_set);
}
// clang-format on

struct ShortConvOperands {
  Reads x;
  MayRead before{}, after{};
  NeedsWeight w;
  MayUseWeight bias{};
  int32_t state_index = 0;
  Writes y;
};
DYNO_FIELDS(ShortConvOperands, x, before, after, w, bias, state_index, y)

DYNO_FIELDS(ShortConvArgs, x, x_stride, before, before_stride, after, after_stride, w, bias, state, slot_positions,
            runs, n_runs, y, y_stride)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<ShortConvArgs>) {
  return {"state", "slot_positions", "runs", "n_runs"};
}

// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<ShortConvOperands>) { return {"state_index"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const ShortConvDesc& d, ShortConvArgs& a, Visitor& v) {
  v.runs(d.m, a);
  v.number("x_stride", a.x_stride, d.n);
  v.number("before_stride", a.before_stride, d.n);
  v.number("after_stride", a.after_stride, d.n);
  v.number("y_stride", a.y_stride, d.n);
  v.in("x", a.x, extent(d.m, a.x_stride, d.n));
  v.optional("before", a.before, extent(d.m, a.before_stride, d.n), d.gated);
  v.optional("after", a.after, extent(d.m, a.after_stride, d.n), d.gated);
  v.require(!d.gated || a.before != nullptr, "before");
  v.require(!d.gated || a.after != nullptr, "after");
  v.in("w", a.w, d.n * d.taps);
  v.optional("bias", a.bias, d.n, false);
  v.state("state", a.state, d.state_elements());
  v.out("y", a.y, extent(d.m, a.y_stride, d.n));
}

}  // namespace dyno::ops
