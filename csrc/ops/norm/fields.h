// The fields of family norm, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/norm/norm.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<NormDesc>, V&& v) {
  using D = NormDesc;
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("rows_per_token", &D::rows_per_token, In::if_set);
  v("add", &D::add, In::if_set); v("centred", &D::centred, In::if_set);
}
// clang-format on

struct NormOperands {
  Reads x;
  MayUseWeight weight{};
  MayRead residual{};
  Writes out;
  float eps = 0.0f;
  float scale = 1.0f;
  int64_t weight_stride = 0;
  MayUseWeight bias{};
};
DYNO_FIELDS(NormOperands, x, weight, residual, out, eps, scale, weight_stride, bias)

DYNO_FIELDS(NormArgs, x, x_stride, weight, weight_stride, residual, out, out_stride, eps, scale, bias)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const NormDesc& d, NormArgs& a, Visitor& v) {
  const int64_t row = d.rows_per_token * d.n;
  v.number("x_stride", a.x_stride, row);
  v.number("out_stride", a.out_stride, row);
  v.in("x", a.x, extent(d.m, a.x_stride, row));
  v.number("weight_stride", a.weight_stride, 0);
  v.optional("weight", a.weight, extent(d.rows_per_token, a.weight_stride, d.n), true);
  v.optional("residual", a.residual, d.m * row, d.add);
  v.require(!d.add || a.residual != nullptr, "residual");
  v.out("out", a.out, extent(d.m, a.out_stride, row));
  v.number("eps", a.eps, 0.0f, 1e-6f);
  v.number("scale", a.scale, 1.0f);
  v.optional("bias", a.bias, d.n, d.centred);
}

}  // namespace dyno::ops
