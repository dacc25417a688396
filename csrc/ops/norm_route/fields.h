// The fields of family norm_route, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/matmul/byte_rows.h"
#include "ops/matmul/layout.h"
#include "ops/norm_route/norm_route.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<NormRouteDesc>, V&& v) {
  using D = NormRouteDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always);
  v("groups", &D::groups, In::if_set); v("groups_used", &D::groups_used, In::if_set);
  v("gating", &D::gating, In::always); v("normalize", &D::normalize, In::if_set);
  v("layout", &D::layout, In::if_set); v("bytes", &D::bytes, In::if_set);
}
// clang-format on

struct NormRouteOperands {
  Reads x;
  MayUseWeight norm{};
  float eps = 0.0f;
  NeedsWeight w;
  MayUseWeight bias{}, selection_bias{};
  float scale = 1.0f;
  int32_t moe_index = 0;
  Writes normed, ids, weights;
  MayWrite bytes{};
};
DYNO_FIELDS(NormRouteOperands, x, norm, eps, w, bias, selection_bias, scale, moe_index, normed, ids, weights, bytes)

DYNO_FIELDS(NormRouteArgs, x, x_stride, norm, eps, w, bias, normed, normed_stride, bytes, route)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<NormRouteArgs>) { return {"route"}; }
// Operands without an argument of the same name; the routing is filled like moe_route's.
constexpr FieldNames only_plan(std::type_identity<NormRouteOperands>) {
  return {"selection_bias", "scale", "moe_index", "ids", "weights"};
}

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const NormRouteDesc& d, NormRouteArgs& a, Visitor& v) {
  v.number("x_stride", a.x_stride, d.k);
  v.number("normed_stride", a.normed_stride, d.k);
  v.in("x", a.x, extent(d.m, a.x_stride, d.k));
  v.optional("norm", a.norm, d.k, true);
  v.number("eps", a.eps, 0.0f, 1e-6f);
  v.bytes("w", a.w, static_cast<int64_t>(layout_bytes(d.type, d.layout, d.experts, d.k)));
  v.optional("bias", a.bias, d.experts, false);
  v.out("normed", a.normed, extent(d.m, a.normed_stride, d.k));
  if (d.bytes) v.bytes_out("bytes", a.bytes, d.m * byte_row_bytes(d.k));
  v.optional("selection_bias", a.route.selection_bias, d.experts, false);
  v.optional("pinned", a.route.pinned, d.m * d.used, false);
  v.number("scale", a.route.scale, 1.0f);
  v.out("ids", a.route.ids, d.m * d.used);
  v.out("weights", a.route.weights, d.m * d.used);
}

}  // namespace dyno::ops
