// The fields of family moe_route, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/moe_route/moe_route.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<MoeRouteDesc>, V&& v) {
  using D = MoeRouteDesc;
  v("m", &D::m, In::never); v("experts", &D::experts, In::always); v("used", &D::used, In::always);
  v("groups", &D::groups, In::if_set); v("groups_used", &D::groups_used, In::if_set);
  v("gating", &D::gating, In::always); v("normalize", &D::normalize, In::if_set);
}
// clang-format on

struct MoeRouteOperands {
  Reads logits;
  MayUseWeight selection_bias{};
  float scale = 1.0f;
  MayUseWeight expert_scale{};
  int32_t moe_index = 0;
  Writes ids, weights;
};
DYNO_FIELDS(MoeRouteOperands, logits, selection_bias, scale, expert_scale, moe_index, ids, weights)

DYNO_FIELDS(MoeRouteArgs, logits, selection_bias, pinned, scale, expert_scale, ids, weights)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<MoeRouteArgs>) { return {"pinned"}; }
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<MoeRouteOperands>) { return {"moe_index"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const MoeRouteDesc& d, MoeRouteArgs& a, Visitor& v) {
  v.in("logits", a.logits, d.m * d.experts);
  v.optional("selection_bias", a.selection_bias, d.experts, false);
  v.optional("pinned", a.pinned, d.m * d.used, false);
  v.number("scale", a.scale, 1.0f);
  v.optional("expert_scale", a.expert_scale, d.experts, false);
  v.out("ids", a.ids, d.m * d.used);
  v.out("weights", a.weights, d.m * d.used);
}

}  // namespace dyno::ops
