// The fields of family mla_expand, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/matmul/layout.h"
#include "ops/mla_expand/mla_expand.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<MlaExpandDesc>, V&& v) {
  using D = MlaExpandDesc;
  v("k_type", &D::k_type, In::always); v("v_type", &D::v_type, In::always); v("m", &D::m, In::never);
  v("heads", &D::heads, In::always); v("nope", &D::nope, In::always); v("rope", &D::rope, In::always);
  v("dv", &D::dv, In::always); v("lora", &D::lora, In::always); v("cache_type", &D::cache_type, In::always);
  v("k_layout", &D::k_layout, In::if_set); v("v_layout", &D::v_layout, In::if_set);
  v("paired", &D::paired, In::if_set);
}
// clang-format on

struct MlaExpandOperands {
  NeedsWeight k_b, v_b;
  Writes keys, values;  // ops::expanded_type()
};
DYNO_FIELDS(MlaExpandOperands, k_b, v_b, keys, values)

DYNO_FIELDS(MlaExpandArgs, latents, row_bytes, k_b, k_b_stride_bytes, v_b, v_b_stride_bytes, keys, values)
// Arguments that the u-batch provides.
constexpr FieldNames from_batch(std::type_identity<MlaExpandArgs>) { return {"latents", "row_bytes"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const MlaExpandDesc& d, MlaExpandArgs& a, Visitor& v) {
  const auto row = static_cast<int64_t>(row_bytes(d.cache_type, d.lora + d.rope));
  v.number("row_bytes", a.row_bytes, row);
  v.latents("latents", a.latents, d.cache_type, d.m, a.row_bytes, d.lora + d.rope);
  v.number("k_b_stride_bytes", a.k_b_stride_bytes,
           static_cast<int64_t>(layout_bytes(d.k_type, d.k_layout, d.lora, d.nope)));
  v.number("v_b_stride_bytes", a.v_b_stride_bytes,
           static_cast<int64_t>(layout_bytes(d.v_type, d.v_layout, d.dv, d.lora)));
  v.bytes("k_b", a.k_b, d.heads * a.k_b_stride_bytes);
  v.bytes("v_b", a.v_b, d.heads * a.v_b_stride_bytes);
  const DType type = expanded_type(d.cache_type);
  v.bytes_out("keys", a.keys, static_cast<int64_t>(row_bytes(type, d.m * d.heads * (d.nope + d.rope))));
  v.bytes_out("values", a.values, static_cast<int64_t>(row_bytes(type, d.m * d.heads * d.dv)));
}

}  // namespace dyno::ops
