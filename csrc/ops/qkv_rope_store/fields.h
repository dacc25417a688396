// The fields of family qkv_rope_store, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/qkv_rope_store/qkv_rope_store.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<QkvRopeStoreDesc>, V&& v) {
  using D = QkvRopeStoreDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("kv_heads", &D::kv_heads, In::always);
  v("dk", &D::dk, In::always); v("dv", &D::dv, In::always); v("n_rot", &D::n_rot, In::always);
  v("nope", &D::nope, In::if_set); v("k_type", &D::k_type, In::always); v("v_type", &D::v_type, In::always);
  v("neox", &D::neox, In::if_set); v("q_norm", &D::q_norm, In::if_set); v("k_norm", &D::k_norm, In::if_set);
  v("v_norm", &D::v_norm, In::if_set); v("latent", &D::latent, In::if_set);
}
// clang-format on

struct QkvRopeStoreOperands {
  Updates q;
  MayWrite q_out{};
  Reads k;
  MayRead v{};
  MayUseWeight q_norm{}, k_norm{};
  float eps = 0.0f;
  int32_t rope_table = 0;
};
DYNO_FIELDS(QkvRopeStoreOperands, q, q_out, k, v, q_norm, k_norm, eps, rope_table)

DYNO_FIELDS(QkvRopeStoreArgs, q, q_stride, q_out, q_out_stride, k, k_stride, v, v_stride, q_norm, k_norm, eps,
            positions, inv_freq, mscale, k_cache, v_cache, k_row_bytes, v_row_bytes, slot_positions, runs, n_runs)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<QkvRopeStoreArgs>) {
  return {"positions",   "inv_freq",    "mscale",         "k_cache", "v_cache",
          "k_row_bytes", "v_row_bytes", "slot_positions", "runs",    "n_runs"};
}
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<QkvRopeStoreOperands>) { return {"rope_table"}; }

// For both families that store k and v in the cache.
template <typename Desc, typename Args, typename Visitor>
void stored_arguments(const Desc& d, Args& a, Visitor& v) {
  v.runs(d.m, a);
  v.number("k_stride", a.k_stride, d.kv_heads * d.dk);
  v.in("k", a.k, extent(d.m, a.k_stride, d.kv_heads * d.dk));
  v.optional("q_norm", a.q_norm, d.dk, d.q_norm);
  v.optional("k_norm", a.k_norm, d.latent ? d.dk - d.n_rot : d.dk, d.k_norm);
  v.number("eps", a.eps, 0.0f, 1e-6f);
  v.in("inv_freq", a.inv_freq, d.n_rot / 2);
  v.number("mscale", a.mscale, 1.0f);
  v.cache("k_cache", a.k_cache, "k_row_bytes", a.k_row_bytes, d.k_type, d.kv_heads * d.dk);
  if (d.latent) return;
  v.number("v_stride", a.v_stride, d.kv_heads * d.dv);
  v.in("v", a.v, extent(d.m, a.v_stride, d.kv_heads * d.dv));
  v.cache("v_cache", a.v_cache, "v_row_bytes", a.v_row_bytes, d.v_type, d.kv_heads * d.dv);
}

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const QkvRopeStoreDesc& d, QkvRopeStoreArgs& a, Visitor& v) {
  stored_arguments(d, a, v);
  v.integers("positions", a.positions, d.m, 4096);
  const int64_t row = d.heads * (d.latent ? d.nope + d.n_rot : d.dk);
  v.number("q_stride", a.q_stride, row);
  if (!d.latent) {
    v.out("q", a.q, extent(d.m, a.q_stride, row));
    return;
  }
  const float* q = nullptr;  // read only
  v.in("q", q, extent(d.m, a.q_stride, row));
  a.q = const_cast<float*>(q);
  v.number("q_out_stride", a.q_out_stride, d.heads * d.dk);
  v.out("q_out", a.q_out, extent(d.m, a.q_out_stride, d.heads * d.dk));
}

}  // namespace dyno::ops
