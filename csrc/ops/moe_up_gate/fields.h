// The fields of family moe_up_gate, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/matmul/byte_rows.h"
#include "ops/moe_up_gate/moe_up_gate.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<MoeUpGateDesc>, V&& v) {
  using D = MoeUpGateDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always); v("activation", &D::activation, In::always);
  v("shared", &D::shared, In::if_set); v("norm", &D::norm, In::if_set);
  v("bytes", &D::bytes, In::if_set); v("layout", &D::layout, In::if_set); v("act", &D::act, In::if_set);
  v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
// clang-format on

struct MoeUpGateOperands {
  Reads x;
  NormOfRows norm{};
  NeedsWeight w_gate, w_up;
  MayUseWeight bias_gate{}, bias_up{};
  Reads ids;
  Writes y;
  Updates workspace;
  MayUseWeight shared_gate{}, shared_up{};
  MayWrite shared_y{};
  MayRead x_bytes{};
};
DYNO_FIELDS(MoeUpGateOperands, x, norm, w_gate, w_up, bias_gate, bias_up, ids, y, workspace, shared_gate, shared_up,
            shared_y, x_bytes)

DYNO_FIELDS(MoeUpGateArgs, x, x_stride_bytes, x_bytes, w_gate, w_up, w_expert_stride_bytes, bias_gate, bias_up, ids, y,
            workspace, norm, shared_gate, shared_up, shared_y)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const MoeUpGateDesc& d, MoeUpGateArgs& a, Visitor& v) {
  const int64_t x_row = act_row_bytes(d.act, d.k);
  v.number("x_stride_bytes", a.x_stride_bytes, x_row);
  v.rows("x", a.x, d.act, extent(d.m, a.x_stride_bytes, x_row));
  if (d.bytes) v.bytes("x_bytes", a.x_bytes, d.m * byte_row_bytes(d.k));
  v.number("w_expert_stride_bytes", a.w_expert_stride_bytes, matrix_bytes(d));
  v.bytes("w_gate", a.w_gate, extent(d.experts, a.w_expert_stride_bytes, matrix_bytes(d)));
  v.bytes("w_up", a.w_up, extent(d.experts, a.w_expert_stride_bytes, matrix_bytes(d)));
  v.optional("bias_gate", a.bias_gate, d.experts * d.n, false);
  v.optional("bias_up", a.bias_up, d.experts * d.n, false);
  v.routing("ids", a.ids, d.m, d.used, d.experts);
  v.out("y", a.y, d.m * d.used * d.n);
  v.out("workspace", a.workspace, moe_workspace_ints(d.m, d.used, d.experts));
  if (d.norm) norm_arguments(d.k, a.norm, v);
  if (d.shared > 0) {
    const auto bytes = static_cast<int64_t>(layout_bytes(d.type, d.layout, d.shared, d.k));
    v.bytes("shared_gate", a.shared_gate, bytes);
    v.bytes("shared_up", a.shared_up, bytes);
    v.out("shared_y", a.shared_y, d.m * d.shared);
  }
}

}  // namespace dyno::ops
