// The fields of family index_select, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/index_select/index_select.h"

namespace dyno::ops {

template <typename V>
constexpr void for_each_field(std::type_identity<IndexSelectDesc>, V&& v) {
  using D = IndexSelectDesc;
  v("m", &D::m, In::never);
  v("heads", &D::heads, In::always);
  v("dk", &D::dk, In::always);
  v("selected", &D::selected, In::always);
}

struct IndexSelectOperands {
  Reads q, weights;
  Writes out;
};
DYNO_FIELDS(IndexSelectOperands, q, weights, out)

DYNO_FIELDS(IndexSelectArgs, q, q_stride, weights, weights_stride, keys, key_row_bytes, slot_positions, runs, n_runs,
            out, out_stride)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<IndexSelectArgs>) {
  return {"keys", "key_row_bytes", "slot_positions", "runs", "n_runs"};
}

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const IndexSelectDesc& d, IndexSelectArgs& a, Visitor& v) {
  v.runs(d.m, a);
  v.number("q_stride", a.q_stride, d.heads * d.dk);
  v.number("weights_stride", a.weights_stride, d.heads);
  v.number("out_stride", a.out_stride, d.selected);
  v.cache("keys", a.keys, "key_row_bytes", a.key_row_bytes, DType::f32, d.dk);
  v.in("q", a.q, extent(d.m, a.q_stride, d.heads * d.dk));
  v.in("weights", a.weights, extent(d.m, a.weights_stride, d.heads));
  v.out("out", a.out, extent(d.m, a.out_stride, d.selected));
}

}  // namespace dyno::ops
