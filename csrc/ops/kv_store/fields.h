// The fields of family kv_store, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/kv_store/kv_store.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<KvStoreDesc>, V&& v) {
  using D = KvStoreDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("width", &D::width, In::always);
}
// clang-format on

struct KvStoreOperands {
  Reads x;
  bool into_values = false;  // store to the value cache; false: to the key cache
};
DYNO_FIELDS(KvStoreOperands, x, into_values)

DYNO_FIELDS(KvStoreArgs, x, x_stride, cache, row_bytes, byte_offset, slot_positions, runs, n_runs)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<KvStoreArgs>) {
  return {"cache", "row_bytes", "byte_offset", "slot_positions", "runs", "n_runs"};
}
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<KvStoreOperands>) { return {"into_values"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const KvStoreDesc& d, KvStoreArgs& a, Visitor& v) {
  v.runs(d.m, a);
  v.number("byte_offset", a.byte_offset, 0);
  v.number("x_stride", a.x_stride, d.width);
  v.in("x", a.x, extent(d.m, a.x_stride, d.width));
  v.cache("cache", a.cache, "row_bytes", a.row_bytes, d.type, d.width, a.byte_offset);
}

}  // namespace dyno::ops
