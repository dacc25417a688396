// The fields of family glu, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/glu/glu.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<GluDesc>, V&& v) {
  using D = GluDesc;
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("activation", &D::activation, In::always);
  v("experts", &D::experts, In::if_set); v("used", &D::used, In::if_set);
}
// clang-format on

struct GluOperands {
  Reads gate, up;
  MayRead ids{};
  MayUseWeight gate_scale{}, up_scale{};
  Writes y;
};
DYNO_FIELDS(GluOperands, gate, up, ids, gate_scale, up_scale, y)

DYNO_FIELDS(GluArgs, gate, gate_stride, up, up_stride, ids, gate_scale, up_scale, y, y_stride)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const GluDesc& d, GluArgs& a, Visitor& v) {
  v.number("gate_stride", a.gate_stride, d.n);
  v.number("up_stride", a.up_stride, d.n);
  v.number("y_stride", a.y_stride, d.n);
  v.in("gate", a.gate, extent(d.m, a.gate_stride, d.n));
  v.in("up", a.up, extent(d.m, a.up_stride, d.n));
  if (d.experts > 0) {
    v.routing("ids", a.ids, d.m, d.used, d.experts);
    v.optional("gate_scale", a.gate_scale, d.experts, true);
    v.optional("up_scale", a.up_scale, d.experts, true);
  }
  v.out("y", a.y, extent(d.m, a.y_stride, d.n));
}

}  // namespace dyno::ops
