// Fused launches around the products: q, k, v on their way to attention and the cache; norm, router and routing.
#include "core/error.h"
#include "plan/fused_list.h"

namespace dyno::plan {

using model::kNone;

namespace {

ops::RopeAttentionDesc heads_desc(const Plan& plan, const model::AttentionSpec& a) {
  return {.heads = a.heads,
          .kv_heads = a.kv_heads,
          .dk = a.dk,
          .dv = a.dv,
          .n_rot = a.rope.n_rot,
          .k_type = plan.kv_type_k,
          .v_type = plan.kv_type_v,
          .neox = a.rope.neox,
          .q_norm = a.q_norm != kNone,
          .k_norm = a.k_norm != kNone,
          .sinks = a.sinks != kNone,
          .windowed = a.window > 0,
          .softcap = a.softcap > 0};
}
ops::RopeAttentionDesc latents_desc(const Plan& plan, const model::AttentionSpec& a) {
  return {.heads = a.heads,
          .dk = a.dk,
          .dv = a.dv,
          .n_rot = a.rope.n_rot,
          .nope = a.nope,
          .k_type = plan.kv_type_k,
          .v_type = plan.kv_type_k,
          .neox = a.rope.neox,
          .k_norm = a.kv_a_norm != kNone,
          .latent = true};
}

}  // namespace

void FusedList::attend(const model::AttentionSpec& a, const Qkv& x, Operand out, int32_t i) {
  const ops::RopeAttentionDesc desc = heads_desc(plan_, a);
  if (!takes(desc)) return OpList::attend(a, x, out, i);
  const int32_t table = rope_table(a.rope);
  Node& node = emit(str_cat("blk.", i, ".rope_attention"), desc, i);
  node.x = x.q;
  node.k = x.k;
  node.v = x.v;
  node.y = out;
  node.w = a.sinks;
  node.w2 = a.q_norm;
  node.w3 = a.k_norm;
  node.eps = static_cast<float>(model_.norm_eps);
  node.rope_table = table;
  node.scale = static_cast<float>(a.scale);
  node.softcap = static_cast<float>(a.softcap);
  node.window = static_cast<int32_t>(a.window);
}

void FusedList::attend_latents(const model::AttentionSpec& a, Operand absorbed, Operand q, Operand out, int32_t i) {
  if (!latent_) return OpList::attend_latents(a, absorbed, q, out, i);
  const int32_t table = rope_table(a.rope);
  Node& node = emit(str_cat("blk.", i, ".rope_attention"), latents_desc(plan_, a), i);
  node.x = absorbed;
  node.q_rotary = q;
  node.k = latent_;
  node.y = out;
  node.w3 = a.kv_a_norm;
  node.eps = static_cast<float>(model_.norm_eps);
  node.rope_table = table;
  node.scale = static_cast<float>(a.scale);
  latent_ = {};
}

void FusedList::store_qkv(const model::AttentionSpec& a, const Qkv& x, int32_t i) {
  const ops::QkvRopeStoreDesc desc{.heads = a.heads,
                                   .kv_heads = a.kv_heads,
                                   .dk = a.dk,
                                   .dv = a.dv,
                                   .n_rot = a.rope.n_rot,
                                   .k_type = plan_.kv_type_k,
                                   .v_type = plan_.kv_type_v,
                                   .neox = a.rope.neox,
                                   .q_norm = a.q_norm != kNone,
                                   .k_norm = a.k_norm != kNone};
  if (!takes(desc)) return OpList::store_qkv(a, x, i);
  const int32_t table = rope_table(a.rope);
  Node& node = emit(str_cat("blk.", i, ".qkv_rope_store"), desc, i);
  node.x = x.q;
  node.k = x.k;
  node.v = x.v;
  node.w = a.q_norm;
  node.w2 = a.k_norm;
  node.eps = static_cast<float>(model_.norm_eps);
  node.rope_table = table;
}

void FusedList::store_latent(const model::AttentionSpec& a, Operand q, Operand latent, int32_t i) {
  const ops::QkvRopeStoreDesc desc{.heads = a.heads,
                                   .dk = a.dk,
                                   .dv = a.dv,
                                   .n_rot = a.rope.n_rot,
                                   .nope = a.nope,
                                   .k_type = plan_.kv_type_k,
                                   .v_type = plan_.kv_type_k,
                                   .neox = a.rope.neox,
                                   .k_norm = a.kv_a_norm != kNone,
                                   .latent = true};
  if (takes(latents_desc(plan_, a))) {
    latent_ = latent;
    absorbed_ = value(str_cat("blk.", i, ".q_absorbed"), a.heads * a.dk);
    return;
  }
  if (!takes(desc)) return OpList::store_latent(a, q, latent, i);
  const int32_t table = rope_table(a.rope);
  absorbed_ = value(str_cat("blk.", i, ".q_absorbed"), a.heads * a.dk);
  Node& node = emit(str_cat("blk.", i, ".latent_rope_store"), desc, i);
  node.x = q;
  node.y = absorbed_;
  node.k = latent;
  node.w2 = a.kv_a_norm;
  node.eps = static_cast<float>(model_.norm_eps);
  node.rope_table = table;
}

OpList::Routing FusedList::route_experts(const model::FfnSpec& f, Input& h, int32_t i) {
  const model::Weight& router = model_.weight(f.router);
  const ops::NormRouteDesc desc{.type = router.type,
                                .layout = plan_.weights[static_cast<size_t>(f.router)].layout,
                                .k = router.cols,
                                .experts = f.experts,
                                .used = f.used,
                                .groups = f.groups,
                                .groups_used = f.groups_used,
                                .gating = f.gating,
                                .normalize = f.normalize};
  if (h.f32 || !takes(desc)) return OpList::route_experts(f, h, i);
  const Routing routing = routing_values(f, i);
  h.f32 = value(h.name, h.width);  // the normed rows, for the experts
  Node& node = emit(str_cat("blk.", i, ".norm_route"), desc, i);
  node.x = h.before;
  node.y = h.f32;
  node.ids = routing.ids;
  node.route_weights = routing.weights;
  node.w = f.router;
  node.w2 = h.norm;
  node.bias = f.router_bias;
  node.bias2 = f.selection_bias;
  node.eps = static_cast<float>(model_.norm_eps);
  node.scale = static_cast<float>(f.weights_scale);
  node.moe_index = moe_count_++;
  return routing;
}

}  // namespace dyno::plan
