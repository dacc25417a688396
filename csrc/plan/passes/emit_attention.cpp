// Attention of a layer: from the residual stream to the rows that it adds to it.
#include "plan/passes/emit.h"

#include "core/error.h"
#include "ops/args.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

Emitter::Qkv Emitter::qkv_products(const model::AttentionSpec& a, Input& h, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const int64_t q_width = a.heads * a.dk;
  const int64_t k_width = a.kv_heads * a.dk;
  const int64_t v_width = a.kv_heads * a.dv;
  if (a.qkv != kNone) {
    const Operand q = value(p + "qkv", q_width + k_width + v_width);
    matmul(p + "attn_qkv", h, a.qkv, a.qkv_bias, q, {}, 1.0f, i);
    return {q, slice(q, q_width), slice(q, q_width + k_width)};
  }
  if (a.shared_kv >= 0) {
    const Qkv only{.q = value(p + "q", q_width)};
    matmul(p + "attn_q", h, a.q, a.q_bias, only.q, {}, 1.0f, i);
    return only;
  }
  const Qkv out{value(p + "q", q_width), value(p + "k", k_width), value(p + "v", v_width)};
  matmul(p + "attn_q", h, a.q, a.q_bias, out.q, {}, 1.0f, i);
  beside([&] { matmul(p + "attn_k", h, a.k, a.k_bias, out.k, {}, 1.0f, i); });
  if (a.v_is_k) {
    emit(p + "v_of_k", ops::CopyDesc{.act = ops::ActType::f32, .k = k_width}, {.x = out.k, .out = out.v}, i);
  } else {
    beside([&] { matmul(p + "attn_v", h, a.v, a.v_bias, out.v, {}, 1.0f, i); });
  }
  return out;
}

void Emitter::store_qkv(const model::AttentionSpec& a, const Qkv& x, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const auto norms = [&] {
    const bool whole = a.qk_norm == model::QkNorm::projection;
    const auto norm = [&](const std::string& name, Operand rows, WeightId weight, int64_t heads) {
      if (weight != kNone) head_norm(name, rows, weight, whole ? 1 : heads, whole ? heads * a.dk : a.dk, i);
    };
    norm(p + "attn_q_norm", x.q, a.q_norm, a.heads);
    if (x.k) norm(p + "attn_k_norm", x.k, a.k_norm, a.kv_heads);
    if (x.v && a.v_norm) head_norm(p + "attn_v_norm", x.v, kNone, a.kv_heads, a.dv, i);
  };
  const bool after_rope = a.qk_norm == model::QkNorm::heads_after_rope;
  if (!after_rope) norms();
  rope(p + "rope_q", x.q, a.rope, a.heads, a.dk, 0, i);
  model::RopeSpec of_keys = a.rope;
  of_keys.position_scale = 0;
  if (x.k) rope(p + "rope_k", x.k, of_keys, a.kv_heads, a.dk, 0, i);
  if (after_rope) norms();
  if (!x.k) return;
  store(p + "kv_store_k", x.k, a.kv_heads * a.dk, false, i);
  store(p + "kv_store_v", x.v, a.kv_heads * a.dv, true, i);
}

void Emitter::two_products(Input& x, const Product& first, const Product& second, int32_t i) {
  matmul(first.name, x, first.w, kNone, first.y, {}, 1.0f, i);
  beside([&] { matmul(second.name, x, second.w, kNone, second.y, {}, 1.0f, i); });
}

void Emitter::store_latent(const model::AttentionSpec& a, Operand q, Operand latent, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  rope(p + "rope_q", q, a.rope, a.heads, a.nope + a.rope.n_rot, a.nope, i);
  head_norm(p + "attn_kv_a_norm", latent, a.kv_a_norm, 1, a.kv_lora, i);
  rope(p + "rope_k", latent, a.rope, 1, a.dk, a.kv_lora, i);
  store(p + "kv_store", latent, a.dk, false, i);
}

void Emitter::gqa(const model::LayerSpec& layer, int32_t i) {
  const model::AttentionSpec& a = layer.attention;
  const std::string p = str_cat("blk.", i, ".");
  Input h = normed(p + "attn_norm", residual_, layer.attn_norm, model_.n_embd);
  const Qkv qkv = qkv_products(a, h, i);
  const int64_t width = a.heads * a.dv;
  Operand gate;
  if (a.gate != kNone) {
    gate = value(p + "attn_gate", width);
    matmul(p + "attn_gate", h, a.gate, kNone, gate, {}, 1.0f, i);
  }
  const Operand out = value(p + "attention", width);
  attend(a, qkv, out, i);
  if (gate) {
    emit(p + "attention_gate", ops::SigmoidGateDesc{.n = width, .gates = width}, {.x = out, .gate = gate, .y = out}, i);
  }

  Input o{.f32 = out, .width = a.heads * a.dv, .name = p + "attention"};
  project(p + "attn_output", o, a.output, a.output_bias, layer.attn_post_norm, p + "attn_post_norm", i);
}

void Emitter::attend(const model::AttentionSpec& a, const Qkv& qkv, Operand out, int32_t i) {
  store_qkv(a, qkv, i);
  emit(str_cat("blk.", i, ".attention"),
       ops::AttentionDesc{.heads = a.heads,
                          .kv_heads = a.kv_heads,
                          .dk = a.dk,
                          .dv = a.dv,
                          .k_type = plan_.kv_type_k,
                          .v_type = plan_.kv_type_v,
                          .sinks = a.sinks != kNone,
                          .windowed = a.window > 0,
                          .softcap = a.softcap > 0,
                          .exact = exact_attention(i)},
       {.q = qkv.q,
        .sinks = a.sinks,
        .scale = static_cast<float>(a.scale),
        .softcap = static_cast<float>(a.softcap),
        .window = static_cast<int32_t>(a.window),
        .cache_layer = static_cast<int32_t>(a.shared_kv),
        .out = out},
       i);
}

void Emitter::mla(const model::LayerSpec& layer, int32_t i) {
  const model::AttentionSpec& a = layer.attention;
  const std::string p = str_cat("blk.", i, ".");
  Input h = normed(p + "attn_norm", residual_, layer.attn_norm, model_.n_embd);
  const int64_t key_head = a.nope + a.rope.n_rot;
  const Operand q = value(p + "q", a.heads * key_head);
  // The cache row: the normalised latent, then the rotary key.
  const Operand latent = value(p + "kv_a", a.dk);
  if (a.q_a != kNone) {
    const int64_t q_lora = model_.weight(a.q_a).rows;
    const Operand low = value(p + "q_a", q_lora);
    two_products(h, {p + "attn_q_a", a.q_a, low}, {p + "attn_kv_a", a.kv_a, latent}, i);
    Input q_low = normed(p + "attn_q_a_norm", low, a.q_a_norm, q_lora);
    matmul(p + "attn_q_b", q_low, a.q_b, kNone, q, {}, 1.0f, i);
    if (plan_.selects > 0 && a.indexer.heads > 0) select_positions(a, h, q_low, i);
  } else {
    two_products(h, {p + "attn_q", a.q, q}, {p + "attn_kv_a", a.kv_a, latent}, i);
  }
  store_latent(a, q, latent, i);

  Input o{.f32 = latent_attention(a, q, i), .width = a.heads * a.v_head, .name = p + "attention_v"};
  project(p + "attn_output", o, a.output, a.output_bias, layer.attn_post_norm, p + "attn_post_norm", i);
}

// Keys are kept in float32, because rounded keys would change the selection. The scores have no scale: a positive
// factor of all scores does not change their order.
void Emitter::select_positions(const model::AttentionSpec& a, Input& h, Input& q_low, int32_t i) {
  const model::AttentionSpec::Indexer& x = a.indexer;
  const std::string p = str_cat("blk.", i, ".indexer_");
  const Operand q = value(p + "q", x.heads * x.dk), k = value(p + "k", x.dk), weights = value(p + "weights", x.heads);
  matmul(p + "q_b", q_low, x.q_b, kNone, q, {}, 1.0f, i);
  matmul(p + "k", h, x.k, kNone, k, {}, 1.0f, i);
  matmul(p + "weights", h, x.weights, kNone, weights, {}, 1.0f, i);
  emit(p + "k_norm", ops::NormDesc{.n = x.dk, .centred = true},
       {.x = k, .weight = x.k_norm, .out = k, .eps = static_cast<float>(x.eps), .bias = x.k_norm_bias}, i);
  rope(p + "rope_q", q, x.rope, x.heads, x.dk, 0, i);
  rope(p + "rope_k", k, x.rope, 1, x.dk, 0, i);
  emit(p + "store", ops::KvStoreDesc{.width = x.dk, .type = DType::f32}, {.x = k, .into_values = true}, i);
  selected_ = value(p + "selected", plan_.selects);
  emit(p + "select", ops::IndexSelectDesc{.heads = x.heads, .dk = x.dk, .selected = plan_.selects},
       {.q = q, .weights = weights, .out = selected_}, i);
}

Operand Emitter::latent_attention(const model::AttentionSpec& a, Operand q, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const int64_t key_head = a.nope + a.rope.n_rot;
  // Queries for the latents: [heads, kv_lora + rotary].
  const auto heads = static_cast<int32_t>(a.heads);
  const Operand absorbed = value(p + "q_absorbed", a.heads * a.dk);
  Operand head_rows = q;
  head_rows.stride_bytes = key_head * kF32;
  Input q_nope{.f32 = head_rows, .width = a.nope, .rows_factor = heads, .name = p + "q_nope"};
  Operand target = absorbed;
  target.batch_stride_bytes = a.dk * kF32;
  batched_matmul(p + "attn_k_b", q_nope, a.k_b, target, i);
  Operand rotary = slice(absorbed, a.kv_lora);
  rotary.stride_bytes = a.dk * kF32;
  emit(p + "q_rotary", ops::CopyDesc{.act = ops::ActType::f32, .k = a.rope.n_rot},
       {.x = slice(head_rows, a.nope), .out = rotary}, i, heads);

  const Operand mixed = value(p + "attention", a.heads * a.kv_lora);
  attend_latents(a, absorbed, mixed, i);

  const Operand out = value(p + "attention_v", a.heads * a.v_head);
  Operand mixed_rows = mixed;
  mixed_rows.stride_bytes = a.kv_lora * kF32;
  Input latent_out{.f32 = mixed_rows, .width = a.kv_lora, .rows_factor = heads, .name = p + "attention"};
  target = out;
  target.batch_stride_bytes = a.v_head * kF32;
  batched_matmul(p + "attn_v_b", latent_out, a.v_b, target, i);
  return out;
}

void Emitter::attend_latents(const model::AttentionSpec& a, Operand absorbed, Operand out, int32_t i) {
  emit(str_cat("blk.", i, ".attention"),
       ops::AttentionDesc{.heads = a.heads,
                          .kv_heads = 1,
                          .dk = a.dk,
                          .dv = a.dv,
                          .k_type = plan_.kv_type_k,
                          .v_type = plan_.kv_type_k,
                          .v_in_k = true,
                          .exact = exact_attention(i),
                          .selected = a.selects > 0 ? plan_.selects : 0},
       {.q = absorbed,
        .selected = a.selects > 0 ? selected_ : Operand{},
        .scale = static_cast<float>(a.scale),
        .out = out},
       i);
}

}  // namespace dyno::plan
