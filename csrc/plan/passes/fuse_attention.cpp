// Part of fuse(): norms of heads, rotation, store and, if a kernel supports it, attention itself become one launch.
#include <algorithm>
#include <optional>

#include "core/error.h"
#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

using model::kNone;

// The fused launches normalise heads before they rotate them. Norms of whole projections keep their own launch.
bool norms_inside(const model::AttentionSpec& a) { return a.qk_norm == model::QkNorm::heads; }

ops::RopeAttentionDesc heads_desc(const Plan& plan, const model::AttentionSpec& a) {
  return {.heads = a.heads,
          .kv_heads = a.kv_heads,
          .dk = a.dk,
          .dv = a.dv,
          .n_rot = a.rope.n_rot,
          .k_type = plan.kv_type_k,
          .v_type = plan.kv_type_v,
          .neox = a.rope.neox,
          .q_norm = a.q_norm != kNone && norms_inside(a),
          .k_norm = a.k_norm != kNone && norms_inside(a),
          .sinks = a.sinks != kNone,
          .windowed = a.window > 0,
          .softcap = a.softcap > 0,
          .v_norm = a.v_norm};
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

// The nodes of a layer between its first products and attention's output.
struct Attention {
  Span store;        // norms of heads, rotation, the cache
  size_t attention;  // index of the attention node
};

Attention find_attention(const Nodes& nodes, int32_t layer, bool norms) {
  Span span = layer_span(nodes, layer);
  // An indexer comes first, with a rotation and a store of its own.
  for (size_t i = span.begin; i < span.end; ++i) {
    if (operands_of<IndexSelectOperands>(nodes[i]) != nullptr) span.begin = i + 1;
  }
  const auto any = [](const auto&) { return true; };
  const size_t rope = find_node<RopeOperands>(nodes, span, any);
  const size_t attention = find_node<AttentionOperands>(nodes, span, any);
  Attention found{.store = {rope, rope}, .attention = attention};
  // Norms of heads are in place.
  const auto in_place = [&](size_t i) {
    const auto* norm = operands_of<NormOperands>(nodes[i]);
    return norm != nullptr && norm->x.value == norm->out.value;
  };
  while (norms && found.store.begin > span.begin && in_place(found.store.begin - 1)) --found.store.begin;
  for (size_t i = rope; i < attention; ++i) {
    if (operands_of<KvStoreOperands>(nodes[i]) != nullptr) found.store.end = i + 1;
  }
  return found;
}

const DeviceInfo& cache_device(const Plan& plan, int32_t layer) {
  return plan.device(plan.kv[static_cast<size_t>(layer)].device);
}

// A launch on the cache can include norms whose weights are on the same device.
bool norms_with_cache(const Plan& plan, int32_t layer, std::initializer_list<model::WeightId> norms) {
  return std::all_of(norms.begin(), norms.end(), [&](model::WeightId id) {
    return id == kNone || plan.weights[static_cast<size_t>(id)].device == plan.kv[static_cast<size_t>(layer)].device;
  });
}

// q, k and v of a layer, as its nodes rotate and store them.
struct Rotated {
  Operand q, k, v;
};
Rotated find_rotated(const Nodes& nodes, Span store) {
  Rotated found;
  for (size_t i = store.begin; i < store.end; ++i) {
    if (const auto* rope = operands_of<RopeOperands>(nodes[i])) (found.q ? found.k : found.q) = rope->x;
    const auto* kv = operands_of<KvStoreOperands>(nodes[i]);
    if (kv != nullptr && kv->into_values) found.v = kv->x;
  }
  return found;
}

// The nodes of a layer whose heads a fused launch can normalise, rotate and store, and the operands of that launch.
struct Heads {
  Attention found;
  Rotated x;
  Operand copy{};  // of k, if values are keys; the fused launches only read k
  model::WeightId q_norm = kNone, k_norm = kNone;
};
std::optional<Heads> find_heads(const Plan& plan, const model::AttentionSpec& a, const Nodes& nodes, int32_t layer) {
  if (a.q_norm != kNone && a.qk_norm == model::QkNorm::heads_after_rope) return std::nullopt;
  if (a.v_norm && !norms_inside(a)) return std::nullopt;
  if (a.rope.position_scale != 0) return std::nullopt;  // the launches rotate queries and keys with one table
  const Attention found = find_attention(nodes, layer, norms_inside(a));
  Heads heads{.found = found, .x = find_rotated(nodes, found.store)};
  if (a.v_is_k) {
    heads.copy = heads.x.v;
    heads.x.v = heads.x.k;
  }
  if (norms_inside(a)) heads.q_norm = a.q_norm, heads.k_norm = a.k_norm;
  if (!norms_with_cache(plan, layer, {heads.q_norm, heads.k_norm})) return std::nullopt;
  return heads;
}

void erase_copy(Nodes& nodes, int32_t layer, const Heads& heads) {
  if (!heads.copy) return;
  const size_t at = find_node<CopyOperands>(nodes, layer_span(nodes, layer),
                                            [&](const CopyOperands& o) { return o.out.value == heads.copy.value; });
  nodes.erase(nodes.begin() + static_cast<std::ptrdiff_t>(at));
}

void store_heads(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer, const Heads& heads) {
  const model::AttentionSpec& a = model.layers[static_cast<size_t>(layer)].attention;
  replace_nodes(nodes, heads.found.store,
                make_node(str_cat("blk.", layer, ".qkv_rope_store"), layer, heads_desc(plan, a).store(),
                          {.q = heads.x.q,
                           .k = heads.x.k,
                           .v = heads.x.v,
                           .q_norm = heads.q_norm,
                           .k_norm = heads.k_norm,
                           .eps = static_cast<float>(model.norm_eps),
                           .rope_table = rope_table(plan, model, a.rope)}));
  erase_copy(nodes, layer, heads);
}

void fuse_heads(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer) {
  const model::AttentionSpec& a = model.layers[static_cast<size_t>(layer)].attention;
  const std::optional<Heads> heads = find_heads(plan, a, nodes, layer);
  if (!heads) return;
  const DeviceInfo& device = cache_device(plan, layer);
  const ops::RopeAttentionDesc desc = heads_desc(plan, a);
  if (!fused_takes(device, desc)) {
    if (fused_takes(device, desc.store())) store_heads(plan, model, nodes, layer, *heads);
    return;
  }
  const AttentionOperands attention = *operands_of<AttentionOperands>(nodes[heads->found.attention]);
  replace_nodes(nodes, {heads->found.store.begin, heads->found.attention + 1},
                make_node(str_cat("blk.", layer, ".rope_attention"), layer, desc,
                          {.q = heads->x.q,
                           .k = heads->x.k,
                           .v = heads->x.v,
                           .q_norm = heads->q_norm,
                           .k_norm = heads->k_norm,
                           .eps = static_cast<float>(model.norm_eps),
                           .rope_table = rope_table(plan, model, a.rope),
                           .sinks = a.sinks,
                           .scale = attention.scale,
                           .softcap = attention.softcap,
                           .window = attention.window,
                           .out = attention.out}));
  erase_copy(nodes, layer, *heads);
}

// The copy of the rotary part is removed as well. The launch that rotates it writes it next to the absorbed queries, or
// attention reads it in place. Attention to selected positions keeps its own launch, and so does attention of
// `many_tokens`. False if nothing is fused.
bool fuse_latents(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer, bool many_tokens) {
  const model::AttentionSpec& a = model.layers[static_cast<size_t>(layer)].attention;
  const ops::RopeAttentionDesc whole = latents_desc(plan, a);
  const DeviceInfo& device = cache_device(plan, layer);
  if (!norms_with_cache(plan, layer, {a.kv_a_norm})) return false;
  const bool attends = !many_tokens && (plan.selects == 0 || a.selects == 0) && fused_takes(device, whole);
  const ops::OpDesc store = whole.store();
  const bool stores =
      many_tokens ? fused_takes(device, store, {kFusedTokens + 1, kBatchedTokens}) : fused_takes(device, store);
  if (!attends && !stores) return false;
  const Attention found = find_attention(nodes, layer, true);
  const Rotated x = find_rotated(nodes, found.store);
  const AttentionOperands attention = *operands_of<AttentionOperands>(nodes[found.attention]);
  const auto eps = static_cast<float>(model.norm_eps);
  const int32_t table = rope_table(plan, model, a.rope);
  const auto erase = [&](Span span) {
    nodes.erase(nodes.begin() + static_cast<std::ptrdiff_t>(span.begin),
                nodes.begin() + static_cast<std::ptrdiff_t>(span.end));
  };
  if (attends) {
    nodes[found.attention] = make_node(str_cat("blk.", layer, ".rope_attention"), layer, whole,
                                       {.q = attention.q,
                                        .q_rotary = x.q,
                                        .k = x.k,
                                        .k_norm = a.kv_a_norm,
                                        .eps = eps,
                                        .rope_table = table,
                                        .scale = attention.scale,
                                        .out = attention.out});
  }
  const size_t copy = find_node<CopyOperands>(nodes, {found.store.end, found.attention},
                                              [&](const CopyOperands& o) { return o.out.value == attention.q.value; });
  erase({copy, copy + 1});
  if (attends) {
    erase(found.store);
    return true;
  }
  replace_nodes(
      nodes, found.store,
      make_node(str_cat("blk.", layer, ".latent_rope_store"), layer, whole.store(),
                {.q = x.q, .q_out = attention.q, .k = x.k, .k_norm = a.kv_a_norm, .eps = eps, .rope_table = table}));
  return true;
}

}  // namespace

bool fuse_stores(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer) {
  const model::AttentionSpec& a = model.layers[static_cast<size_t>(layer)].attention;
  if (a.kind == model::AttentionKind::mla) return fuse_latents(plan, model, nodes, layer, /*many_tokens=*/true);
  const std::optional<Heads> heads = find_heads(plan, a, nodes, layer);
  const ops::OpDesc desc = heads_desc(plan, a).store();
  if (!heads || !fused_takes(cache_device(plan, layer), desc, {kFusedTokens + 1, kBatchedTokens})) return false;
  store_heads(plan, model, nodes, layer, *heads);
  return true;
}

void fuse_attention(Plan& plan, const model::ModelDesc& model, Nodes& nodes, int32_t layer) {
  if (model.layers[static_cast<size_t>(layer)].attention.kind == model::AttentionKind::mla) {
    fuse_latents(plan, model, nodes, layer, /*many_tokens=*/false);
  } else {
    fuse_heads(plan, model, nodes, layer);
  }
}

}  // namespace dyno::plan
