#include "plan/expanded_list.h"

#include "core/error.h"

namespace dyno::plan {

Operand ExpandedList::latent_attention(const model::AttentionSpec& a, Operand q, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const int64_t key_head = a.nope + a.rope.n_rot;
  const model::Weight& k_b = model_.weight(a.k_b);
  const model::Weight& v_b = model_.weight(a.v_b);
  // One sequence at a time, so that the memory of one context is enough.
  const auto halves = [&](int64_t width) { return static_cast<size_t>(plan_.context.ctx * a.heads * width) * 2; };
  const Operand keys = value_bytes(p + "keys", 0, halves(key_head));
  const Operand values = value_bytes(p + "values", 0, halves(a.v_head));
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
  Node& node = emit(p + "attention",
                    ops::AttentionDesc{.heads = a.heads,
                                       .kv_heads = a.heads,
                                       .dk = key_head,
                                       .dv = a.v_head,
                                       .k_type = DType::f16,
                                       .v_type = DType::f16},
                    i);
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
