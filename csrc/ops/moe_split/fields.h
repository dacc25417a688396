// The fields of family moe_split, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/moe_split/moe_split.h"

namespace dyno::ops {

template <typename V>
constexpr void for_each_field(std::type_identity<MoeSplitDesc>, V&& v) {
  using D = MoeSplitDesc;
  v("m", &D::m, In::never);
  v("experts", &D::experts, In::always);
  v("used", &D::used, In::always);
}

struct MoeSplitOperands {
  Reads ids;
  int32_t place_table = 0;  // an index into Plan::expert_places
  Writes here, there;
};
DYNO_FIELDS(MoeSplitOperands, ids, place_table, here, there)

DYNO_FIELDS(MoeSplitArgs, ids, places, here, there, counts)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<MoeSplitArgs>) { return {"places", "counts"}; }
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<MoeSplitOperands>) { return {"place_table"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const MoeSplitDesc& d, MoeSplitArgs& a, Visitor& v) {
  v.routing("ids", a.ids, d.m, d.used, d.experts);
  v.integers("places", a.places, d.experts, d.experts);
  v.out("here", a.here, d.m * d.used);
  v.out("there", a.there, d.m * d.used);
  v.optional_out("counts", a.counts, d.experts);
}

}  // namespace dyno::ops
