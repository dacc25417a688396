// The fields of family attention, by name: of its key, of a node's operands and of a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/attention/attention.h"
#include "ops/half_tiles.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<AttentionDesc>, V&& v) {
  using D = AttentionDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("kv_heads", &D::kv_heads, In::always);
  v("dk", &D::dk, In::always); v("dv", &D::dv, In::always); v("k_type", &D::k_type, In::always);
  v("v_type", &D::v_type, In::always);
  v("v_in_k", &D::v_in_k, In::if_set); v("sinks", &D::sinks, In::if_set); v("windowed", &D::windowed, In::if_set);
  v("softcap", &D::softcap, In::if_set);
  v("exact", &D::exact, In::if_set); v("out_tiles", &D::out_tiles, In::never);
  v("paired", &D::paired, In::if_set); v("selected", &D::selected, In::if_set);
}
// clang-format on

// Keys and values come from the cache, or from `keys` and `values` if these are given.
struct AttentionOperands {
  Reads q;
  MayRead keys{}, values{}, selected{};
  MayUseWeight sinks{};
  float scale = 1.0f;
  float softcap = 0.0f;
  int32_t window = 0;
  int32_t cache_layer = -1;  // layer whose cache is read; -1: the node's own layer
  Writes out;
};
DYNO_FIELDS(AttentionOperands, q, keys, values, selected, sinks, scale, softcap, window, cache_layer, out)

DYNO_FIELDS(AttentionArgs, q, q_stride, k_cache, v_cache, k_row_bytes, v_row_bytes, slot_positions, runs, n_runs,
            host_runs, depth, sinks, scale, softcap, window, settled, out, out_stride, selected, selected_stride)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<AttentionArgs>) {
  return {"k_cache", "v_cache", "k_row_bytes", "v_row_bytes", "slot_positions",
          "runs",    "n_runs",  "host_runs",   "depth",       "settled"};
}
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<AttentionOperands>) { return {"keys", "values", "cache_layer"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const AttentionDesc& d, AttentionArgs& a, Visitor& v) {
  v.runs(d.m, a);
  v.number("q_stride", a.q_stride, d.heads * d.dk);
  v.number("out_stride", a.out_stride, d.heads * d.dv);
  v.cache("k_cache", a.k_cache, "k_row_bytes", a.k_row_bytes, d.k_type, d.kv_heads * d.dk);
  if (!d.v_in_k) v.cache("v_cache", a.v_cache, "v_row_bytes", a.v_row_bytes, d.v_type, d.kv_heads * d.dv);
  v.in("q", a.q, extent(d.m, a.q_stride, d.heads * d.dk));
  v.optional("sinks", a.sinks, d.heads, d.sinks);
  v.require(!d.sinks || a.sinks != nullptr, "sinks");
  v.number("scale", a.scale, 1.0f, 0.1f);
  v.number("softcap", a.softcap, 0.0f, 30.0f);
  v.number("window", a.window, 0, 1024);
  v.number("settled", a.settled, false);
  v.number("selected_stride", a.selected_stride, d.selected);
  if (d.selected > 0) v.integers("selected", a.selected, extent(d.m, a.selected_stride, d.selected), a.slot_positions);
  if (d.out_tiles > 0) {
    v.bytes_out("out_tiles", a.out, half_tiles(d.m, d.heads * d.dv, d.out_tiles).bytes());
  } else {
    v.out("out", a.out, extent(d.m, a.out_stride, d.heads * d.dv));
  }
}

}  // namespace dyno::ops
