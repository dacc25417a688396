// The fields of every Desc with their names: the one list that op keys, their parser and the bindings read.
//
// for_each_field(std::type_identity<D>{}, visit) calls visit(name, &D::field, In) in the order of the op key. `In` says
// how the key shows it:
//   always    type fields stand alone when the name is "type", all others are name=value
//   if_set    left out while the field has its default (what "off" means: batch=1, layout=plain, a flag that is false)
//   never     not part of the key: the number of tokens, and what settings decide
// A name that ends in "_type" is shown without that ending: k=f16.
#pragma once

#include <type_traits>

#include "core/field_count.h"
#include "ops/op.h"

namespace dyno::ops {

enum class In : uint8_t { always, if_set, never };

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<EmbedDesc>, V&& v) {
  using D = EmbedDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always);
}
template <typename V>
constexpr void for_each_field(std::type_identity<NormDesc>, V&& v) {
  using D = NormDesc;
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("rows_per_token", &D::rows_per_token, In::if_set);
  v("add", &D::add, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<RopeDesc>, V&& v) {
  using D = RopeDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("head_dim", &D::head_dim, In::always);
  v("n_rot", &D::n_rot, In::always); v("offset", &D::offset, In::if_set); v("neox", &D::neox, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<MatmulDesc>, V&& v) {
  using D = MatmulDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("batch", &D::batch, In::if_set); v("norm", &D::norm, In::if_set); v("layout", &D::layout, In::if_set); v("act", &D::act, In::if_set);
  v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
template <typename V>
constexpr void for_each_field(std::type_identity<MatmulIdDesc>, V&& v) {
  using D = MatmulIdDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always); v("x_per_slot", &D::x_per_slot, In::if_set);
  v("layout", &D::layout, In::if_set); v("act", &D::act, In::if_set);
  v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
template <typename V>
constexpr void for_each_field(std::type_identity<UpGateDesc>, V&& v) {
  using D = UpGateDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("activation", &D::activation, In::always); v("norm", &D::norm, In::if_set); v("layout", &D::layout, In::if_set);
  v("act", &D::act, In::if_set);
  v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
template <typename V>
constexpr void for_each_field(std::type_identity<MoeUpGateDesc>, V&& v) {
  using D = MoeUpGateDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always); v("activation", &D::activation, In::always);
  v("norm", &D::norm, In::if_set);
  v("layout", &D::layout, In::if_set); v("act", &D::act, In::if_set);
  v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
template <typename V>
constexpr void for_each_field(std::type_identity<MoeRouteDesc>, V&& v) {
  using D = MoeRouteDesc;
  v("m", &D::m, In::never); v("experts", &D::experts, In::always); v("used", &D::used, In::always);
  v("groups", &D::groups, In::if_set); v("groups_used", &D::groups_used, In::if_set);
  v("gating", &D::gating, In::always); v("normalize", &D::normalize, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<MoeSumDesc>, V&& v) {
  using D = MoeSumDesc;
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("used", &D::used, In::always);
}
template <typename V>
constexpr void for_each_field(std::type_identity<AttentionDesc>, V&& v) {
  using D = AttentionDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("kv_heads", &D::kv_heads, In::always);
  v("dk", &D::dk, In::always); v("dv", &D::dv, In::always); v("k_type", &D::k_type, In::always);
  v("v_type", &D::v_type, In::always);
  v("v_in_k", &D::v_in_k, In::if_set); v("sinks", &D::sinks, In::if_set); v("windowed", &D::windowed, In::if_set);
  v("softcap", &D::softcap, In::if_set);
  v("exact", &D::exact, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<KvStoreDesc>, V&& v) {
  using D = KvStoreDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("width", &D::width, In::always);
}
template <typename V>
constexpr void for_each_field(std::type_identity<CopyDesc>, V&& v) {
  using D = CopyDesc;
  v("m", &D::m, In::never); v("k", &D::k, In::always); v("act", &D::act, In::always);
}
template <typename V>
constexpr void for_each_field(std::type_identity<SampleDesc>, V&& v) {
  using D = SampleDesc;
  v("m", &D::m, In::never); v("n_vocab", &D::n_vocab, In::always);
}
template <typename V>
constexpr void for_each_field(std::type_identity<GluDesc>, V&& v) {
  using D = GluDesc;
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("activation", &D::activation, In::always);
}
template <typename V>
constexpr void for_each_field(std::type_identity<QkvDesc>, V&& v) {
  using D = QkvDesc;
  v("type", &D::type, In::always); v("type_k", &D::type_k, In::always); v("type_v", &D::type_v, In::always);
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("n_k", &D::n_k, In::always); v("n_v", &D::n_v, In::if_set);
  v("k", &D::k, In::always); v("norm", &D::norm, In::if_set); v("layout", &D::layout, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<MoeDownSumDesc>, V&& v) {
  using D = MoeDownSumDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always); v("layout", &D::layout, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<MlaExpandDesc>, V&& v) {
  using D = MlaExpandDesc;
  v("k_type", &D::k_type, In::always); v("v_type", &D::v_type, In::always); v("m", &D::m, In::never);
  v("heads", &D::heads, In::always); v("nope", &D::nope, In::always); v("rope", &D::rope, In::always);
  v("dv", &D::dv, In::always); v("lora", &D::lora, In::always); v("cache_type", &D::cache_type, In::always);
  v("k_layout", &D::k_layout, In::if_set); v("v_layout", &D::v_layout, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<QkvRopeStoreDesc>, V&& v) {
  using D = QkvRopeStoreDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("kv_heads", &D::kv_heads, In::always);
  v("dk", &D::dk, In::always); v("dv", &D::dv, In::always); v("n_rot", &D::n_rot, In::always);
  v("nope", &D::nope, In::if_set); v("k_type", &D::k_type, In::always); v("v_type", &D::v_type, In::always);
  v("neox", &D::neox, In::if_set); v("q_norm", &D::q_norm, In::if_set); v("k_norm", &D::k_norm, In::if_set);
  v("latent", &D::latent, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<NormRouteDesc>, V&& v) {
  using D = NormRouteDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("k", &D::k, In::always);
  v("experts", &D::experts, In::always); v("used", &D::used, In::always);
  v("groups", &D::groups, In::if_set); v("groups_used", &D::groups_used, In::if_set);
  v("gating", &D::gating, In::always); v("normalize", &D::normalize, In::if_set);
  v("layout", &D::layout, In::if_set);
}
template <typename V>
constexpr void for_each_field(std::type_identity<RopeAttentionDesc>, V&& v) {
  using D = RopeAttentionDesc;
  v("m", &D::m, In::never); v("heads", &D::heads, In::always); v("kv_heads", &D::kv_heads, In::always);
  v("dk", &D::dk, In::always); v("dv", &D::dv, In::always); v("n_rot", &D::n_rot, In::always);
  v("nope", &D::nope, In::if_set); v("k_type", &D::k_type, In::always); v("v_type", &D::v_type, In::always);
  v("neox", &D::neox, In::if_set); v("q_norm", &D::q_norm, In::if_set); v("k_norm", &D::k_norm, In::if_set);
  v("latent", &D::latent, In::if_set); v("sinks", &D::sinks, In::if_set); v("windowed", &D::windowed, In::if_set);
  v("softcap", &D::softcap, In::if_set);
}
// clang-format on

namespace detail {
template <typename D>
constexpr size_t listed_fields() {
  size_t count = 0;
  for_each_field(std::type_identity<D>{}, [&](std::string_view, auto, In) { ++count; });
  return count;
}
}  // namespace detail
// A field that is not listed would be in no key and could not be set from Python.
#define DYNO_OP_FAMILY(name, Stem, ...)                                           \
  static_assert(detail::listed_fields<Stem##Desc>() == field_count<Stem##Desc>(), \
                "ops/fields.h lists every field of " #Stem "Desc once");
#include "ops/families.def"

}  // namespace dyno::ops
