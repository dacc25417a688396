#include "plan/expanded_list.h"

#include "core/error.h"
#include "ops/attention/attention.h"
#include "ops/mla_expand/mla_expand.h"

namespace dyno::plan {

Operand ExpandedList::latent_attention(const model::AttentionSpec& a, Operand q, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const int64_t key_head = a.nope + a.rope.n_rot;
  const model::Weight& k_b = model_.weight(a.k_b);
  const model::Weight& v_b = model_.weight(a.v_b);
  // One sequence at a time, so that the memory of one context is enough.
  const DType type = ops::expanded_type(plan_.kv_type_k);
  const auto bytes = [&](int64_t width) { return row_bytes(type, plan_.context.ctx * a.heads * width); };
  const Operand keys = value_bytes(p + "keys", 0, bytes(key_head));
  const Operand values = value_bytes(p + "values", 0, bytes(a.v_head));
  Node& expand = emit(p + "mla_expand",
                      ops::MlaExpandDesc{.k_type = k_b.type,
                                         .v_type = v_b.type,
                                         .heads = a.heads,
                                         .nope = a.nope,
                                         .rope = a.rope.n_rot,
                                         .dv = a.v_head,
                                         .lora = a.kv_lora,
                                         .cache_type = plan_.kv_type_k,
                                         .k_layout = plan_.weights[static_cast<size_t>(a.k_b)].layout,
                                         .v_layout = plan_.weights[static_cast<size_t>(a.v_b)].layout},
                      i);
  expand.keys = keys;
  expand.values = values;
  expand.w = a.k_b;
  expand.w2 = a.v_b;
  expand.per_run = true;

  const Operand out = value(p + "attention", a.heads * a.v_head);
  const ops::AttentionDesc attention{
      .heads = a.heads, .kv_heads = a.heads, .dk = key_head, .dv = a.v_head, .k_type = type, .v_type = type};
  if (type == DType::f32) plan_.expands_f32 = kExpandF32 && ops::attention_in_pairs(attention, plan_.device);
  Node& node = emit(p + "attention", attention, i);
  node.x = q;
  node.y = out;
  node.keys = keys;
  node.values = values;
  node.scale = static_cast<float>(a.scale);
  node.per_run = true;
  list_.select_node = static_cast<int32_t>(list_.nodes.size() - 1);
  list_.select_values = {residual_.value, out.value};
  return out;
}

}  // namespace dyno::plan
