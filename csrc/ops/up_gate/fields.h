// The fields of family up_gate, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/half_tiles.h"
#include "ops/up_gate/up_gate.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<UpGateDesc>, V&& v) {
  using D = UpGateDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("activation", &D::activation, In::always); v("norm", &D::norm, In::if_set); v("layout", &D::layout, In::if_set);
  v("act", &D::act, In::if_set);
  v("y_tiles", &D::y_tiles, In::never); v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
// clang-format on

struct UpGateOperands {
  Reads x;
  NormOfRows norm{};
  NeedsWeight w_gate, w_up;
  MayUseWeight bias_gate{}, bias_up{};
  Writes y;
};
DYNO_FIELDS(UpGateOperands, x, norm, w_gate, w_up, bias_gate, bias_up, y)

DYNO_FIELDS(UpGateArgs, x, x_stride_bytes, w_gate, w_up, bias_gate, bias_up, y, y_stride, norm)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const UpGateDesc& d, UpGateArgs& a, Visitor& v) {
  const int64_t x_row = act_row_bytes(d.act, d.k);
  v.number("x_stride_bytes", a.x_stride_bytes, x_row);
  v.rows("x", a.x, d.act, extent(d.m, a.x_stride_bytes, x_row));
  v.bytes("w_gate", a.w_gate, matrix_bytes(d));
  v.bytes("w_up", a.w_up, matrix_bytes(d));
  v.optional("bias_gate", a.bias_gate, d.n, false);
  v.optional("bias_up", a.bias_up, d.n, false);
  v.number("y_stride", a.y_stride, d.n);
  if (d.y_tiles > 0) {
    v.bytes_out("y_tiles", a.y, half_tiles(d.m, d.n, d.y_tiles).bytes());
  } else {
    v.out("y", a.y, extent(d.m, a.y_stride, d.n));
  }
  if (d.norm) norm_arguments(d.k, a.norm, v);
}

}  // namespace dyno::ops
