// The fields of family rope_attention, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/qkv_rope_store/fields.h"
#include "ops/rope_attention/rope_attention.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<RopeAttentionDesc>, V&& v) {
  using D = RopeAttentionDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("kv_heads", &D::kv_heads, In::always);
  v("dk", &D::dk, In::always); v("dv", &D::dv, In::always); v("n_rot", &D::n_rot, In::always);
  v("nope", &D::nope, In::if_set); v("k_type", &D::k_type, In::always); v("v_type", &D::v_type, In::always);
  v("neox", &D::neox, In::if_set); v("q_norm", &D::q_norm, In::if_set); v("k_norm", &D::k_norm, In::if_set);
  v("v_norm", &D::v_norm, In::if_set); v("latent", &D::latent, In::if_set); v("sinks", &D::sinks, In::if_set); v("windowed", &D::windowed, In::if_set);
  v("softcap", &D::softcap, In::if_set);
}
// clang-format on

struct RopeAttentionOperands {
  Reads q;
  MayRead q_rotary{};
  Reads k;
  MayRead v{};
  MayUseWeight q_norm{}, k_norm{};
  float eps = 0.0f;
  int32_t rope_table = 0;
  MayUseWeight sinks{};
  float scale = 1.0f;
  float softcap = 0.0f;
  int32_t window = 0;
  Writes out;
};
DYNO_FIELDS(RopeAttentionOperands, q, q_rotary, k, v, q_norm, k_norm, eps, rope_table, sinks, scale, softcap, window,
            out)

DYNO_FIELDS(RopeAttentionArgs, q, q_stride, q_rotary, q_rotary_stride, k, k_stride, v, v_stride, q_norm, k_norm, eps,
            positions, inv_freq, mscale, k_cache, v_cache, k_row_bytes, v_row_bytes, slot_positions, runs, n_runs,
            host_runs, depth, sinks, scale, softcap, window, settled, out, out_stride)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<RopeAttentionArgs>) {
  return {"positions",      "inv_freq", "mscale", "k_cache",   "v_cache", "k_row_bytes", "v_row_bytes",
          "slot_positions", "runs",     "n_runs", "host_runs", "depth",   "settled"};
}
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<RopeAttentionOperands>) { return {"rope_table"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const RopeAttentionDesc& d, RopeAttentionArgs& a, Visitor& v) {
  stored_arguments(d, a, v);
  v.integers("positions", a.positions, d.m, 4096);
  v.number("q_stride", a.q_stride, d.heads * d.dk);
  v.in("q", a.q, extent(d.m, a.q_stride, d.heads * d.dk));
  if (d.latent) {
    const int64_t row = d.heads * (d.nope + d.n_rot);
    v.number("q_rotary_stride", a.q_rotary_stride, row);
    v.in("q_rotary", a.q_rotary, extent(d.m, a.q_rotary_stride, row));
  }
  v.optional("sinks", a.sinks, d.heads, d.sinks);
  v.require(!d.sinks || a.sinks != nullptr, "sinks");
  v.number("scale", a.scale, 1.0f, 0.1f);
  v.number("softcap", a.softcap, 0.0f, 30.0f);
  v.number("window", a.window, 0, 1024);
  v.number("settled", a.settled, false, true);
  v.number("out_stride", a.out_stride, d.heads * d.dv);
  v.out("out", a.out, extent(d.m, a.out_stride, d.heads * d.dv));
}

}  // namespace dyno::ops
