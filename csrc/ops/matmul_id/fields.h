// The fields of family matmul_id, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/matmul_id/matmul_id.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<MatmulIdDesc>, V&& v) {
  using D = MatmulIdDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always); v("x_per_slot", &D::x_per_slot, In::if_set);
  v("layout", &D::layout, In::if_set); v("act", &D::act, In::if_set);
  v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
// clang-format on

struct MatmulIdOperands {
  Reads x;
  NeedsWeight w;
  MayUseWeight bias{};
  Reads ids;
  Writes y;
  Updates workspace;
};
DYNO_FIELDS(MatmulIdOperands, x, w, bias, ids, y, workspace)

DYNO_FIELDS(MatmulIdArgs, x, x_stride_bytes, w, w_expert_stride_bytes, bias, ids, y, workspace)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const MatmulIdDesc& d, MatmulIdArgs& a, Visitor& v) {
  const int64_t x_row = act_row_bytes(d.act, d.k);
  v.number("x_stride_bytes", a.x_stride_bytes, x_row);
  v.rows("x", a.x, d.act, extent(d.x_per_slot ? d.m * d.used : d.m, a.x_stride_bytes, x_row));
  v.number("w_expert_stride_bytes", a.w_expert_stride_bytes, matrix_bytes(d));
  v.bytes("w", a.w, extent(d.experts, a.w_expert_stride_bytes, matrix_bytes(d)));
  v.optional("bias", a.bias, d.experts * d.n, false);
  v.routing("ids", a.ids, d.m, d.used, d.experts);
  v.out("y", a.y, d.m * d.used * d.n);
  v.out("workspace", a.workspace, moe_workspace_ints(d.m, d.used, d.experts));
}

}  // namespace dyno::ops
