// The fields of family embed, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/embed/embed.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<EmbedDesc>, V&& v) {
  using D = EmbedDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always);
}
// clang-format on

struct EmbedOperands {
  NeedsWeight table;
  Writes out;
  float scale = 1.0f;
};
DYNO_FIELDS(EmbedOperands, table, out, scale)

DYNO_FIELDS(EmbedArgs, table, rows, ids, out, scale)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<EmbedArgs>) { return {"rows", "ids"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const EmbedDesc& d, EmbedArgs& a, Visitor& v) {
  v.number("rows", a.rows, 0, 1024);
  v.bytes("table", a.table, a.rows * static_cast<int64_t>(row_bytes(d.type, d.n)));
  v.integers("ids", a.ids, d.m, a.rows);
  v.out("out", a.out, d.m * d.n);
  v.number("scale", a.scale, 1.0f);
}

}  // namespace dyno::ops
