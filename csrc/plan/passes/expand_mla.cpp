// The op list for prompts of models with latent attention: keys and values of all heads are computed from the latents,
// and then attention is the same as in other models.
#include "core/error.h"
#include "ops/attention/attention.h"
#include "ops/mla_expand/mla_expand.h"
#include "plan/passes/passes.h"

namespace dyno::plan {
namespace {

// Whether the device expands latents to f16 pairs, and computes attention over them.
bool pairs_supported(ops::AttentionDesc attention, ops::MlaExpandDesc expansion, const DeviceInfo& device) {
  attention.paired = expansion.paired = true;
  return ops::attention_in_pairs(attention, device) &&
         ops::supports(expansion, ops::default_config(expansion, device), device).ok;
}

// Replaces the absorbing product, the copy of the rotary part, attention over the latents and the product with v_b by
// the expansion and attention over its keys and values.
void expand_layer(Plan& plan, const model::ModelDesc& model, NodeList& list, int32_t layer) {
  Nodes& nodes = list.nodes;
  const model::AttentionSpec& a = model.layers[static_cast<size_t>(layer)].attention;
  const Span span = layer_span(nodes, layer);
  const auto product = [&](model::WeightId w) {
    return find_node<MatmulOperands>(nodes, span, [&](const MatmulOperands& o) { return o.w.id == w; });
  };
  const size_t first = product(a.k_b), last = product(a.v_b);
  // The product with k_b reads rows of heads. The queries are the whole value that contains these rows.
  Operand q = operands_of<MatmulOperands>(nodes[first])->x;
  q.stride_bytes = static_cast<int64_t>(plan.values[static_cast<size_t>(q.value)].bytes_per_token);
  q.batch_stride_bytes = 0;
  Operand out = operands_of<MatmulOperands>(nodes[last])->y;
  out.batch_stride_bytes = 0;

  const DeviceInfo& device = plan.device(plan.kv[static_cast<size_t>(layer)].device);
  const std::string p = str_cat("blk.", layer, ".");
  const int64_t key_head = a.nope + a.rope.n_rot;
  // One sequence at a time, so that the memory of one context is enough.
  const DType type = ops::expanded_type(plan.kv_type_k);
  const auto made = [&](const char* name, int64_t width) {
    const size_t bytes = row_bytes(type, plan.context.ctx * a.heads * width);
    return Operand{.value = add_value(plan, p + name, 0, bytes, list.id)};
  };
  const Operand keys = made("keys", key_head), values = made("values", a.v_head);
  ops::AttentionDesc desc{
      .heads = a.heads, .kv_heads = a.heads, .dk = key_head, .dv = a.v_head, .k_type = type, .v_type = type};
  ops::MlaExpandDesc expansion{.k_type = plan.type_of(a.k_b),
                               .v_type = plan.type_of(a.v_b),
                               .heads = a.heads,
                               .nope = a.nope,
                               .rope = a.rope.n_rot,
                               .dv = a.v_head,
                               .lora = a.kv_lora,
                               .cache_type = plan.kv_type_k,
                               .k_layout = plan.weights[static_cast<size_t>(a.k_b)].layout,
                               .v_layout = plan.weights[static_cast<size_t>(a.v_b)].layout};
  if (type == DType::f32) {
    desc.paired = expansion.paired = pairs_supported(desc, expansion, device);
    plan.expands_f32 = kExpandF32 && ops::attention_in_pairs(desc, device);
  }
  Node expand =
      make_node(p + "mla_expand", layer, expansion, {.k_b = a.k_b, .v_b = a.v_b, .keys = keys, .values = values});
  Node attention =
      make_node(p + "attention", layer, desc,
                {.q = q, .keys = keys, .values = values, .scale = static_cast<float>(a.scale), .out = out});
  expand.per_run = attention.per_run = true;
  replace_nodes(nodes, {first + 1, last + 1}, std::move(attention));
  replace_nodes(nodes, {first, first + 1}, std::move(expand));
}

}  // namespace

NodeList expand_mla(Plan& plan, const model::ModelDesc& model, const NodeList& from, ListId id) {
  if (plan.selects > 0) return {.id = id};  // queries of selected positions read latents in place
  NodeList list = list_from(model, from, id);
  bool expands = false;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const model::AttentionSpec& a = model.layers[i].attention;
    if (a.kind != model::AttentionKind::mla || !model.layers[i].has_attention()) continue;
    // The expansion does not support factors.
    if (model.weight(a.k_b).scale != 1.0 || model.weight(a.v_b).scale != 1.0) continue;
    // A layer on several devices stays as it is, because values of the expanded form cannot move between its launches.
    const bool together = stand_together(plan, {a.q_a != model::kNone ? a.q_b : a.q, a.kv_a, a.k_b, a.v_b});
    if (!together || plan.device(plan.kv[i].device).kind != DeviceKind::cuda) continue;
    expand_layer(plan, model, list, static_cast<int32_t>(i));
    expands = true;
  }
  return expands ? list : NodeList{.id = id};
}

}  // namespace dyno::plan
