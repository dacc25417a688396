#include "plan/op_list.h"

#include <algorithm>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/args.h"
#include "ops/copy/act_q8.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

namespace {
constexpr int64_t kF32 = sizeof(float);
}

// ---- values and nodes ----------------------------------------------------------------------------------------------

Operand OpList::value_bytes(const std::string& name, size_t bytes_per_token, size_t bytes_fixed) {
  plan_.values.push_back({.name = name, .bytes_per_token = bytes_per_token, .bytes_fixed = bytes_fixed});
  return {.value = static_cast<ValueId>(plan_.values.size() - 1),
          .stride_bytes = static_cast<int64_t>(bytes_per_token)};
}

Operand OpList::value(const std::string& name, int64_t width) {
  return value_bytes(name, static_cast<size_t>(width * kF32));
}

Operand OpList::slice(Operand operand, int64_t offset_elements) {
  operand.offset_bytes += offset_elements * kF32;
  return operand;
}

Node& OpList::emit(const std::string& name, ops::OpDesc desc, int32_t layer, int32_t rows_factor) {
  const std::string key = ops::op_key(desc);
  const auto known = std::find_if(plan_.keys.begin(), plan_.keys.end(),
                                  [&](const OpUse& use) { return use.key == key && use.rows_factor == rows_factor; });
  const auto index = static_cast<int32_t>(known - plan_.keys.begin());
  if (known == plan_.keys.end()) {
    plan_.keys.push_back({.desc = desc, .key = key, .count = 1, .rows_factor = rows_factor});
  } else {
    ++known->count;
  }
  plan_.nodes.push_back({.name = name, .layer = layer, .key = index, .rows_factor = rows_factor});
  return plan_.nodes.back();
}

void OpList::touch(const Operand& operand, int node) {
  if (!operand) return;
  Value& v = plan_.values[static_cast<size_t>(operand.value)];
  if (v.first_use < 0) v.first_use = node;
  v.last_use = std::max(v.last_use, node);
}

void OpList::finish_uses() {
  for (size_t i = 0; i < plan_.nodes.size(); ++i) {
    const Node& n = plan_.nodes[i];
    for (const Operand& o : {n.x, n.y, n.residual, n.ids, n.route_weights, n.workspace, n.gate}) {
      touch(o, static_cast<int>(i));
    }
  }
}

// ---- shared pieces -------------------------------------------------------------------------------------------------

ops::ActType OpList::act_for(WeightId id) const {
  // GPU kernels take f32 rows and convert them as they need.
  if (plan_.device.kind == DeviceKind::cuda) return ops::ActType::f32;
  const bool quantised = !is_float(model_.weight(id).type);
  return quantised && plan_.load.numerics == Numerics::standard ? ops::ActType::q8 : ops::ActType::f32;
}

// On the CPU attention is f32 throughout.
bool OpList::exact_attention() const {
  return plan_.device.kind == DeviceKind::cuda && plan_.load.numerics == Numerics::exact;
}

Operand OpList::as(ops::ActType act, Input& input, int32_t layer) {
  if (act == ops::ActType::f32) return input.f32;
  if (!input.q8) {
    const size_t row = ops::act_q8_row_bytes(input.width);
    Operand out = value_bytes(input.name + " (q8)", row * static_cast<size_t>(input.rows_factor));
    out.stride_bytes = static_cast<int64_t>(row);
    Node& n = emit(input.name + " quantise", ops::CopyDesc{.act = act, .k = input.width}, layer, input.rows_factor);
    n.x = input.f32;
    n.y = out;
    input.q8 = out;
  }
  return input.q8;
}

Operand OpList::rms_norm(const std::string& name, Operand x, WeightId weight, int64_t n, int32_t layer) {
  const Operand y = value(name, n);
  Node& node = emit(name, ops::NormDesc{.n = n}, layer);
  node.x = x;
  node.y = y;
  node.w = weight;
  node.eps = static_cast<float>(model_.norm_eps);
  return y;
}

void OpList::head_norm(const std::string& name, Operand x, WeightId weight, int64_t heads, int64_t dim, int32_t layer) {
  Node& node = emit(name, ops::NormDesc{.n = dim, .rows_per_token = heads}, layer);
  node.x = x;
  node.y = x;
  node.w = weight;
  node.eps = static_cast<float>(model_.norm_eps);
}

void OpList::matmul(const std::string& name, Input& x, WeightId w, WeightId bias, Operand y, Operand residual,
                    float scale, int32_t layer) {
  const model::Weight& weight = model_.weight(w);
  const ops::ActType act = act_for(w);
  const Operand input = as(act, x, layer);
  Node& node = emit(name,
                    ops::MatmulDesc{.type = weight.type,
                                    .layout = plan_.weights[static_cast<size_t>(w)].layout,
                                    .act = act,
                                    .n = weight.rows,
                                    .k = weight.cols},
                    layer);
  node.x = input;
  node.y = y;
  node.residual = residual;
  node.w = w;
  node.bias = bias;
  node.scale = scale;
}

// One product per head: x holds `batch` rows a token.
void OpList::batched_matmul(const std::string& name, Input& x, WeightId w, Operand y, int32_t layer) {
  const model::Weight& weight = model_.weight(w);
  const ops::ActType act = act_for(w);
  Operand input = as(act, x, layer);
  // From rows of (token, head) to tokens with a stride between heads.
  input.batch_stride_bytes = input.stride_bytes;
  input.stride_bytes *= weight.batch;
  Node& node = emit(name,
                    ops::MatmulDesc{.type = weight.type,
                                    .layout = plan_.weights[static_cast<size_t>(w)].layout,
                                    .act = act,
                                    .n = weight.rows,
                                    .k = weight.cols,
                                    .batch = weight.batch},
                    layer);
  node.x = input;
  node.y = y;
  node.w = w;
}

void OpList::project(const std::string& name, Input& x, WeightId w, WeightId bias, WeightId post_norm,
                     const std::string& post_norm_name, int32_t layer) {
  const auto scale = static_cast<float>(model_.residual_scale);
  if (post_norm == kNone) {
    matmul(name, x, w, bias, residual_, residual_, scale, layer);
    return;
  }
  const Operand out = value(name, model_.n_embd);
  matmul(name, x, w, bias, out, {}, scale, layer);
  Node& node = emit(post_norm_name, ops::NormDesc{.n = model_.n_embd, .add = true}, layer);
  node.x = out;
  node.y = residual_;
  node.residual = residual_;
  node.w = post_norm;
  node.eps = static_cast<float>(model_.norm_eps);
}

int32_t OpList::rope_table(const model::RopeSpec& spec) {
  std::vector<float> factors;
  if (spec.frequency_factors != kNone) {
    const model::Weight& weight = model_.weight(spec.frequency_factors);
    factors.resize(static_cast<size_t>(weight.cols));
    dequantize_row(weight.tensor->type, weight.tensor->data, factors.data(), weight.cols);
  }
  RopeTable table = make_rope_table(spec, factors.empty() ? nullptr : factors.data());
  const auto known = std::find(plan_.rope_tables.begin(), plan_.rope_tables.end(), table);
  if (known != plan_.rope_tables.end()) return static_cast<int32_t>(known - plan_.rope_tables.begin());
  plan_.rope_tables.push_back(std::move(table));
  return static_cast<int32_t>(plan_.rope_tables.size() - 1);
}

void OpList::rope(const std::string& name, Operand x, const model::RopeSpec& spec, int64_t heads, int64_t head_dim,
                  int64_t offset, int32_t layer) {
  const int32_t table = rope_table(spec);
  Node& node = emit(
      name,
      ops::RopeDesc{.heads = heads, .head_dim = head_dim, .n_rot = spec.n_rot, .offset = offset, .neox = spec.neox},
      layer);
  node.x = x;
  node.y = x;
  node.rope_table = table;
}

void OpList::store(const std::string& name, Operand x, int64_t width, bool value_cache, int32_t layer) {
  const DType type = value_cache ? plan_.kv_type_v : plan_.kv_type_k;
  Node& node = emit(name, ops::KvStoreDesc{.width = width, .type = type}, layer);
  node.x = x;
  node.value_cache = value_cache;
}

// ---- attention -----------------------------------------------------------------------------------------------------

void OpList::gqa(const model::LayerSpec& layer, int32_t i) {
  const model::AttentionSpec& a = layer.attention;
  const std::string p = str_cat("blk.", i, ".");
  Input h{.f32 = rms_norm(p + "attn_norm", residual_, layer.attn_norm, model_.n_embd, i),
          .width = model_.n_embd,
          .name = p + "attn_norm"};
  const int64_t q_width = a.heads * a.dk;
  const int64_t k_width = a.kv_heads * a.dk;
  const int64_t v_width = a.kv_heads * a.dv;
  Operand q;
  Operand k;
  Operand v;
  if (a.qkv != kNone) {
    q = value(p + "qkv", q_width + k_width + v_width);
    matmul(p + "attn_qkv", h, a.qkv, a.qkv_bias, q, {}, 1.0f, i);
    k = slice(q, q_width);
    v = slice(q, q_width + k_width);
  } else {
    q = value(p + "q", q_width);
    k = value(p + "k", k_width);
    v = value(p + "v", v_width);
    matmul(p + "attn_q", h, a.q, a.q_bias, q, {}, 1.0f, i);
    matmul(p + "attn_k", h, a.k, a.k_bias, k, {}, 1.0f, i);
    matmul(p + "attn_v", h, a.v, a.v_bias, v, {}, 1.0f, i);
  }
  if (a.q_norm != kNone) head_norm(p + "attn_q_norm", q, a.q_norm, a.heads, a.dk, i);
  if (a.k_norm != kNone) head_norm(p + "attn_k_norm", k, a.k_norm, a.kv_heads, a.dk, i);
  rope(p + "rope_q", q, a.rope, a.heads, a.dk, 0, i);
  rope(p + "rope_k", k, a.rope, a.kv_heads, a.dk, 0, i);
  store(p + "kv_store_k", k, k_width, false, i);
  store(p + "kv_store_v", v, v_width, true, i);

  const Operand out = value(p + "attention", a.heads * a.dv);
  Node& node = emit(p + "attention",
                    ops::AttentionDesc{.heads = a.heads,
                                       .kv_heads = a.kv_heads,
                                       .dk = a.dk,
                                       .dv = a.dv,
                                       .k_type = plan_.kv_type_k,
                                       .v_type = plan_.kv_type_v,
                                       .sinks = a.sinks != kNone,
                                       .windowed = a.window > 0,
                                       .softcap = a.softcap > 0,
                                       .exact = exact_attention()},
                    i);
  node.x = q;
  node.y = out;
  node.w = a.sinks;
  node.scale = static_cast<float>(a.scale);
  node.softcap = static_cast<float>(a.softcap);
  node.window = static_cast<int32_t>(a.window);
  plan_.select_node = static_cast<int32_t>(plan_.nodes.size() - 1);
  plan_.select_values = {residual_.value, out.value};

  Input o{.f32 = out, .width = a.heads * a.dv, .name = p + "attention"};
  project(p + "attn_output", o, a.output, a.output_bias, layer.attn_post_norm, p + "attn_post_norm", i);
}

void OpList::mla(const model::LayerSpec& layer, int32_t i) {
  const model::AttentionSpec& a = layer.attention;
  const std::string p = str_cat("blk.", i, ".");
  Input h{.f32 = rms_norm(p + "attn_norm", residual_, layer.attn_norm, model_.n_embd, i),
          .width = model_.n_embd,
          .name = p + "attn_norm"};
  const int64_t key_head = a.nope + a.rope.n_rot;
  const Operand q = value(p + "q", a.heads * key_head);
  if (a.q_a != kNone) {
    const int64_t q_lora = model_.weight(a.q_a).rows;
    const Operand low = value(p + "q_a", q_lora);
    matmul(p + "attn_q_a", h, a.q_a, kNone, low, {}, 1.0f, i);
    Input q_low{
        .f32 = rms_norm(p + "attn_q_a_norm", low, a.q_a_norm, q_lora, i), .width = q_lora, .name = p + "attn_q_a_norm"};
    matmul(p + "attn_q_b", q_low, a.q_b, kNone, q, {}, 1.0f, i);
  } else {
    matmul(p + "attn_q", h, a.q, kNone, q, {}, 1.0f, i);
  }
  rope(p + "rope_q", q, a.rope, a.heads, key_head, a.nope, i);

  // The cache row: the normalised latent, then the rotary key.
  const Operand latent = value(p + "kv_a", a.dk);
  matmul(p + "attn_kv_a", h, a.kv_a, kNone, latent, {}, 1.0f, i);
  head_norm(p + "attn_kv_a_norm", latent, a.kv_a_norm, 1, a.kv_lora, i);
  rope(p + "rope_k", latent, a.rope, 1, a.dk, a.kv_lora, i);
  store(p + "kv_store", latent, a.dk, false, i);

  // Queries against the latent: [heads, kv_lora + rotary].
  const auto heads = static_cast<int32_t>(a.heads);
  Operand absorbed = value(p + "q_absorbed", a.heads * a.dk);
  Operand head_rows = q;
  head_rows.stride_bytes = key_head * kF32;
  Input q_nope{.f32 = head_rows, .width = a.nope, .rows_factor = heads, .name = p + "q_nope"};
  Operand target = absorbed;
  target.batch_stride_bytes = a.dk * kF32;
  batched_matmul(p + "attn_k_b", q_nope, a.k_b, target, i);
  Node& rotary = emit(p + "q_rotary", ops::CopyDesc{.act = ops::ActType::f32, .k = a.rope.n_rot}, i, heads);
  rotary.x = slice(head_rows, a.nope);
  rotary.y = slice(absorbed, a.kv_lora);
  rotary.y.stride_bytes = a.dk * kF32;

  const Operand mixed = value(p + "attention", a.heads * a.kv_lora);
  Node& node = emit(p + "attention",
                    ops::AttentionDesc{.heads = a.heads,
                                       .kv_heads = 1,
                                       .dk = a.dk,
                                       .dv = a.dv,
                                       .k_type = plan_.kv_type_k,
                                       .v_type = plan_.kv_type_k,
                                       .v_in_k = true,
                                       .exact = exact_attention()},
                    i);
  node.x = absorbed;
  node.y = mixed;
  node.scale = static_cast<float>(a.scale);
  plan_.select_node = static_cast<int32_t>(plan_.nodes.size() - 1);
  plan_.select_values = {residual_.value, mixed.value};

  const Operand out = value(p + "attention_v", a.heads * a.v_head);
  Operand mixed_rows = mixed;
  mixed_rows.stride_bytes = a.kv_lora * kF32;
  Input latent_out{.f32 = mixed_rows, .width = a.kv_lora, .rows_factor = heads, .name = p + "attention"};
  target = out;
  target.batch_stride_bytes = a.v_head * kF32;
  batched_matmul(p + "attn_v_b", latent_out, a.v_b, target, i);
  Input o{.f32 = out, .width = a.heads * a.v_head, .name = p + "attention_v"};
  project(p + "attn_output", o, a.output, a.output_bias, layer.attn_post_norm, p + "attn_post_norm", i);
}

// ---- feed-forward --------------------------------------------------------------------------------------------------

Operand OpList::up_gate(const std::string& name, const model::FfnSpec& f, Input& h, int32_t layer) {
  const model::Weight& gate = model_.weight(f.gate);
  const model::Weight& up = model_.weight(f.up);
  const ops::Layout layout = plan_.weights[static_cast<size_t>(f.gate)].layout;
  const Operand out = value(name, f.dense_width);
  if (gate.type == up.type && layout == plan_.weights[static_cast<size_t>(f.up)].layout) {
    const ops::ActType act = act_for(f.gate);
    const Operand input = as(act, h, layer);
    Node& node = emit(name,
                      ops::UpGateDesc{.type = gate.type,
                                      .layout = layout,
                                      .act = act,
                                      .activation = f.activation,
                                      .n = f.dense_width,
                                      .k = gate.cols},
                      layer);
    node.x = input;
    node.y = out;
    node.w = f.gate;
    node.w2 = f.up;
    node.bias = f.gate_bias;
    node.bias2 = f.up_bias;
    return out;
  }
  // Types differ (mixed quantisations): two products, then the activation.
  const Operand g = value(name + " (gate)", f.dense_width);
  matmul(name + " (gate)", h, f.gate, f.gate_bias, g, {}, 1.0f, layer);
  matmul(name + " (up)", h, f.up, f.up_bias, out, {}, 1.0f, layer);
  Node& node = emit(name + " (glu)", ops::GluDesc{.n = f.dense_width, .activation = f.activation}, layer);
  node.gate = g;
  node.x = out;
  node.y = out;
  return out;
}

void OpList::dense_ffn(const model::LayerSpec& layer, int32_t i, Input& h) {
  const std::string p = str_cat("blk.", i, ".");
  Input hidden{
      .f32 = up_gate(p + "ffn_up_gate", layer.ffn, h, i), .width = layer.ffn.dense_width, .name = p + "ffn_up_gate"};
  project(p + "ffn_down", hidden, layer.ffn.down, layer.ffn.down_bias, layer.ffn_post_norm, p + "ffn_post_norm", i);
}

void OpList::moe_ffn(const model::LayerSpec& layer, int32_t i, Input& h) {
  const model::FfnSpec& f = layer.ffn;
  const std::string p = str_cat("blk.", i, ".");
  DYNO_CHECK(UnsupportedError, layer.ffn_post_norm == kNone, "[plan] layer ", i,
             ": a norm after a mixture of experts is not supported");
  const auto used = static_cast<int32_t>(f.used);

  const Operand logits = value(p + "router", f.experts);
  matmul(p + "ffn_router", h, f.router, f.router_bias, logits, {}, 1.0f, i);
  const Operand ids = value_bytes(p + "expert_ids", static_cast<size_t>(f.used) * sizeof(int32_t));
  const Operand weights = value(p + "expert_weights", f.used);
  Node& route = emit(p + "moe_route",
                     ops::MoeRouteDesc{.experts = f.experts,
                                       .used = f.used,
                                       .groups = f.groups,
                                       .groups_used = f.groups_used,
                                       .gating = f.gating,
                                       .normalize = f.normalize},
                     i);
  route.x = logits;
  route.ids = ids;
  route.route_weights = weights;
  route.w = f.selection_bias;
  route.scale = static_cast<float>(f.weights_scale);
  route.moe_index = moe_count_++;

  const size_t row_ints = static_cast<size_t>(ops::moe_workspace_ints(1, f.used, f.experts) -
                                              ops::moe_workspace_ints(0, f.used, f.experts));
  const size_t fixed_ints = static_cast<size_t>(ops::moe_workspace_ints(0, f.used, f.experts));
  const Operand workspace = value_bytes(p + "moe_workspace", row_ints * sizeof(int32_t), fixed_ints * sizeof(int32_t));
  const auto with_experts = [&](Node& node) {
    node.ids = ids;
    node.workspace = workspace;
  };

  const model::Weight& gate = model_.weight(f.experts_gate);
  const model::Weight& up = model_.weight(f.experts_up);
  const ops::Layout gate_layout = plan_.weights[static_cast<size_t>(f.experts_gate)].layout;
  const ops::Layout up_layout = plan_.weights[static_cast<size_t>(f.experts_up)].layout;
  const Operand hidden = value(p + "moe_up_gate", f.used * f.width);
  if (gate.type == up.type && gate_layout == up_layout) {
    const ops::ActType act = act_for(f.experts_gate);
    const Operand input = as(act, h, i);
    Node& node = emit(p + "moe_up_gate",
                      ops::MoeUpGateDesc{.type = gate.type,
                                         .layout = gate_layout,
                                         .act = act,
                                         .activation = f.activation,
                                         .n = f.width,
                                         .k = gate.cols,
                                         .experts = f.experts,
                                         .used = f.used},
                      i);
    node.x = input;
    node.y = hidden;
    node.w = f.experts_gate;
    node.w2 = f.experts_up;
    node.bias = f.experts_gate_bias;
    node.bias2 = f.experts_up_bias;
    with_experts(node);
  } else {
    const Operand g = value(p + "moe_gate", f.used * f.width);
    for (const bool is_gate : {true, false}) {
      const WeightId w = is_gate ? f.experts_gate : f.experts_up;
      const ops::ActType act = act_for(w);
      const Operand input = as(act, h, i);
      Node& node = emit(p + (is_gate ? "moe_gate" : "moe_up"),
                        ops::MatmulIdDesc{.type = model_.weight(w).type,
                                          .layout = is_gate ? gate_layout : up_layout,
                                          .act = act,
                                          .n = f.width,
                                          .k = gate.cols,
                                          .experts = f.experts,
                                          .used = f.used},
                        i);
      node.x = input;
      node.y = is_gate ? g : hidden;
      node.w = w;
      node.bias = is_gate ? f.experts_gate_bias : f.experts_up_bias;
      with_experts(node);
    }
    Node& node = emit(p + "moe_glu", ops::GluDesc{.n = f.used * f.width, .activation = f.activation}, i);
    node.gate = g;
    node.x = hidden;
    node.y = hidden;
  }

  const model::Weight& down = model_.weight(f.experts_down);
  const ops::ActType act = act_for(f.experts_down);
  Operand rows = hidden;
  rows.stride_bytes = f.width * kF32;
  Input down_in{.f32 = rows, .width = f.width, .rows_factor = used, .name = p + "moe_up_gate"};
  const Operand input = as(act, down_in, i);
  const Operand out = value(p + "moe_down", f.used * model_.n_embd);
  Node& node = emit(p + "moe_down",
                    ops::MatmulIdDesc{.type = down.type,
                                      .layout = plan_.weights[static_cast<size_t>(f.experts_down)].layout,
                                      .act = act,
                                      .n = model_.n_embd,
                                      .k = f.width,
                                      .experts = f.experts,
                                      .used = f.used,
                                      .x_per_slot = true},
                    i);
  node.x = input;
  node.y = out;
  node.w = f.experts_down;
  node.bias = f.experts_down_bias;
  with_experts(node);

  Node& sum = emit(p + "moe_sum", ops::MoeSumDesc{.n = model_.n_embd, .used = f.used}, i);
  sum.x = out;
  sum.route_weights = weights;
  sum.residual = residual_;
  sum.y = residual_;
  sum.scale = static_cast<float>(model_.residual_scale);

  if (f.dense_width > 0) {
    Input shared{
        .f32 = up_gate(p + "ffn_shared_up_gate", f, h, i), .width = f.dense_width, .name = p + "ffn_shared_up_gate"};
    matmul(p + "ffn_shared_down", shared, f.down, f.down_bias, residual_, residual_,
           static_cast<float>(model_.residual_scale), i);
  }
}

// ---- the model -----------------------------------------------------------------------------------------------------

void OpList::build() {
  residual_ = value("residual", model_.n_embd);
  plan_.residual = residual_.value;
  Node& embed =
      emit("token_embd", ops::EmbedDesc{.type = model_.weight(model_.token_embd).type, .n = model_.n_embd}, -1);
  embed.y = residual_;
  embed.w = model_.token_embd;
  embed.scale = static_cast<float>(model_.embedding_scale);

  for (size_t i = 0; i < model_.layers.size(); ++i) {
    const model::LayerSpec& layer = model_.layers[i];
    const auto index = static_cast<int32_t>(i);
    if (layer.attention.kind == model::AttentionKind::mla) {
      mla(layer, index);
    } else {
      gqa(layer, index);
    }
    const std::string name = str_cat("blk.", i, ".ffn_norm");
    Input h{
        .f32 = rms_norm(name, residual_, layer.ffn_norm, model_.n_embd, index), .width = model_.n_embd, .name = name};
    if (layer.ffn.kind == model::FfnKind::moe) {
      moe_ffn(layer, index, h);
    } else {
      dense_ffn(layer, index, h);
    }
  }

  plan_.head_node = static_cast<int32_t>(plan_.nodes.size());
  Input h{.f32 = rms_norm("output_norm", residual_, model_.output_norm, model_.n_embd, -1),
          .width = model_.n_embd,
          .name = "output_norm"};
  const Operand logits = value("logits", model_.n_vocab);
  plan_.logits = logits.value;
  matmul("output", h, model_.output, model_.output_bias, logits, {}, static_cast<float>(model_.logit_scale), -1);
  plan_.nodes.back().softcap = static_cast<float>(model_.logit_softcap);
  finish_uses();
}

}  // namespace dyno::plan
