#include "plan/op_list.h"

#include <algorithm>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/args.h"
#include "ops/copy/act_q8.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

// ---- values and nodes ----------------------------------------------------------------------------------------------

Operand OpList::value_bytes(const std::string& name, size_t bytes_per_token, size_t bytes_fixed) {
  plan_.values.push_back(
      {.name = name, .bytes_per_token = bytes_per_token, .bytes_fixed = bytes_fixed, .list = list_.id});
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
    plan_.keys.push_back({.desc = desc, .key = key, .rows_factor = rows_factor});
  }
  ++plan_.keys[static_cast<size_t>(index)].count[static_cast<size_t>(list_.id)];
  list_.nodes.push_back({.name = name, .layer = layer, .key = index, .rows_factor = rows_factor});
  return list_.nodes.back();
}

void OpList::touch(const Operand& operand, int node) {
  if (!operand) return;
  Value& v = plan_.values[static_cast<size_t>(operand.value)];
  if (v.first_use < 0) v.first_use = node;
  v.last_use = std::max(v.last_use, node);
}

void OpList::finish_uses() {
  for (size_t i = 0; i < list_.nodes.size(); ++i) {
    const Node& n = list_.nodes[i];
    for (const Operand& o : {n.x, n.y, n.y2, n.y3, n.residual, n.ids, n.route_weights, n.workspace, n.gate, n.keys,
                             n.values, n.k, n.v, n.q_rotary}) {
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

OpList::Input OpList::normed(const std::string& name, Operand x, WeightId weight, int64_t n) {
  return {.before = x, .norm = weight, .width = n, .name = name};
}

Operand OpList::f32_of(Input& input, int32_t layer) {
  if (!input.f32) input.f32 = rms_norm(input.name, input.before, input.norm, input.width, layer);
  return input.f32;
}

Operand OpList::as(ops::ActType act, Input& input, int32_t layer) {
  const Operand f32 = f32_of(input, layer);
  if (act == ops::ActType::f32) return f32;
  if (!input.q8) {
    const size_t row = ops::act_q8_row_bytes(input.width);
    Operand out = value_bytes(input.name + " (q8)", row * static_cast<size_t>(input.rows_factor));
    out.stride_bytes = static_cast<int64_t>(row);
    Node& n = emit(input.name + " quantise", ops::CopyDesc{.act = act, .k = input.width}, layer, input.rows_factor);
    n.x = f32;
    n.y = out;
    input.q8 = out;
  }
  return input.q8;
}

OpList::Source OpList::source(Input& input, WeightId w, int32_t layer) { return {as(act_for(w), input, layer)}; }

void OpList::set_norm(Node& node, const Source& source, const Input& input) const {
  if (!source.norm) return;
  node.norm = input.norm;
  node.eps = static_cast<float>(model_.norm_eps);
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
  const Source input = source(x, w, layer);
  Node& node = emit(name,
                    ops::MatmulDesc{.type = weight.type,
                                    .layout = plan_.weights[static_cast<size_t>(w)].layout,
                                    .act = act_for(w),
                                    .n = weight.rows,
                                    .k = weight.cols,
                                    .norm = input.norm},
                    layer);
  set_norm(node, input, x);
  node.x = input.x;
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

// ---- the model -----------------------------------------------------------------------------------------------------

void OpList::feed_forward(const model::LayerSpec& layer, int32_t i) {
  Input h = normed(str_cat("blk.", i, ".ffn_norm"), residual_, layer.ffn_norm, model_.n_embd);
  if (layer.ffn.kind == model::FfnKind::moe) {
    moe_ffn(layer, i, h);
  } else {
    dense_ffn(layer, i, h);
  }
}

void OpList::build() {
  residual_ = value("residual", model_.n_embd);
  list_.residual = residual_.value;
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
    feed_forward(layer, index);
  }

  list_.head_node = static_cast<int32_t>(list_.nodes.size());
  Input h = normed("output_norm", residual_, model_.output_norm, model_.n_embd);
  // All lists write the same logits, which lie in the caller's memory.
  Operand logits{.value = plan_.logits, .stride_bytes = model_.n_vocab * kF32};
  if (!logits) logits = value("logits", model_.n_vocab);
  plan_.logits = logits.value;
  matmul("output", h, model_.output, model_.output_bias, logits, {}, static_cast<float>(model_.logit_scale), -1);
  list_.nodes.back().softcap = static_cast<float>(model_.logit_softcap);
  finish_uses();
}

// What it reads and gives lies outside of the arena.
void OpList::build_draw() {
  emit("sample", ops::SampleDesc{.n_vocab = model_.n_vocab}, -1).x = {.value = plan_.logits,
                                                                      .stride_bytes = model_.n_vocab * kF32};
}

}  // namespace dyno::plan
