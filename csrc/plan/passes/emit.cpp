#include "plan/passes/emit.h"

#include <algorithm>

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/args.h"
#include "ops/copy/act_q8.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

// ---- values and nodes ----------------------------------------------------------------------------------------------

Operand Emitter::value_bytes(const std::string& name, size_t bytes_per_token, size_t bytes_fixed) {
  return {.value = add_value(plan_, name, bytes_per_token, bytes_fixed, list_.id),
          .stride_bytes = static_cast<int64_t>(bytes_per_token)};
}

Operand Emitter::value(const std::string& name, int64_t width) {
  return value_bytes(name, static_cast<size_t>(width * kF32));
}

Operand Emitter::slice(Operand operand, int64_t offset_elements) {
  operand.offset_bytes += offset_elements * kF32;
  return operand;
}

// ---- shared pieces -------------------------------------------------------------------------------------------------

ops::ActType Emitter::act_for(WeightId id) const {
  // GPU kernels read f32 rows and convert them as needed.
  if (plan_.device(device_of(id)).kind == DeviceKind::cuda) return ops::ActType::f32;
  const bool quantised = has_codes(type_of(id));
  return quantised && plan_.load.numerics == Numerics::standard ? ops::ActType::q8 : ops::ActType::f32;
}

// On the CPU, attention is always f32.
bool Emitter::exact_on(DeviceId device) const {
  return plan_.device(device).kind == DeviceKind::cuda && plan_.load.numerics == Numerics::exact;
}

Emitter::Input Emitter::normed(const std::string& name, Operand x, WeightId weight, int64_t n) {
  if (weight == kNone) return {.f32 = x, .width = n, .name = name};
  return {.before = x, .norm = weight, .width = n, .name = name};
}

Operand Emitter::f32_of(Input& input, int32_t layer) {
  if (!input.f32) input.f32 = rms_norm(input.name, input.before, input.norm, input.width, layer);
  return input.f32;
}

Operand Emitter::as(ops::ActType act, Input& input, int32_t layer) {
  const Operand f32 = f32_of(input, layer);
  if (act == ops::ActType::f32) return f32;
  if (!input.q8) {
    const size_t row = ops::act_q8_row_bytes(input.width);
    Operand out = value_bytes(input.name + " (q8)", row * static_cast<size_t>(input.rows_factor));
    out.stride_bytes = static_cast<int64_t>(row);
    emit(input.name + " quantise", ops::CopyDesc{.act = act, .k = input.width}, {.x = f32, .out = out}, layer,
         input.rows_factor);
    input.q8 = out;
  }
  return input.q8;
}

Operand Emitter::rms_norm(const std::string& name, Operand x, WeightId weight, int64_t n, int32_t layer) {
  const Operand y = value(name, n);
  emit(name, ops::NormDesc{.n = n}, {.x = x, .weight = weight, .out = y, .eps = static_cast<float>(model_.norm_eps)},
       layer);
  return y;
}

void Emitter::head_norm(const std::string& name, Operand x, WeightId weight, int64_t heads, int64_t dim,
                        int32_t layer) {
  emit(name, ops::NormDesc{.n = dim, .rows_per_token = heads},
       {.x = x, .weight = weight, .out = x, .eps = static_cast<float>(model_.norm_eps)}, layer);
}

void Emitter::matmul(const std::string& name, Input& x, WeightId w, WeightId bias, Operand y, Operand residual,
                     float scale, int32_t layer) {
  const model::Weight& weight = model_.weight(w);
  emit(name,
       ops::MatmulDesc{.type = type_of(w),
                       .layout = layout_of(w),
                       .act = act_for(w),
                       .n = weight.rows,
                       .k = weight.cols,
                       .exact = exact_on(device_of(w))},
       {.x = source(x, w, layer), .w = w, .bias = bias, .residual = residual, .scale = scale * scale_of(w), .y = y},
       layer);
}

// One product per head: x has `batch` rows per token.
void Emitter::batched_matmul(const std::string& name, Input& x, WeightId w, Operand y, int32_t layer) {
  const model::Weight& weight = model_.weight(w);
  const ops::ActType act = act_for(w);
  Operand input = as(act, x, layer);
  // From rows of (token, head) to tokens with a stride between heads.
  input.batch_stride_bytes = input.stride_bytes;
  input.stride_bytes *= weight.batch;
  emit(name,
       ops::MatmulDesc{.type = type_of(w),
                       .layout = layout_of(w),
                       .act = act,
                       .n = weight.rows,
                       .k = weight.cols,
                       .batch = weight.batch},
       {.x = input, .w = w, .scale = scale_of(w), .y = y}, layer);
}

void Emitter::project(const std::string& name, Input& x, WeightId w, WeightId bias, WeightId post_norm,
                      const std::string& post_norm_name, int32_t layer, double output_scale) {
  const auto scale = static_cast<float>(model_.residual_scale);
  if (post_norm == kNone) {
    DYNO_CHECK(UnsupportedError, output_scale == 1.0, "[plan] layer ", layer,
               ": a scale of the output without a norm before it is not supported");
    matmul(name, x, w, bias, residual_, residual_, scale, layer);
    return;
  }
  const Operand out = value(name, model_.n_embd);
  matmul(name, x, w, bias, out, {}, scale, layer);
  emit(post_norm_name, ops::NormDesc{.n = model_.n_embd, .add = true},
       {.x = out,
        .weight = post_norm,
        .residual = residual_,
        .out = residual_,
        .eps = static_cast<float>(model_.post_norm_eps > 0 ? model_.post_norm_eps : model_.norm_eps),
        .scale = static_cast<float>(output_scale)},
       layer);
}

int32_t rope_table(Plan& plan, const model::ModelDesc& model, const model::RopeSpec& spec) {
  std::vector<float> factors;
  if (spec.frequency_factors != kNone) {
    const model::Weight& weight = model.weight(spec.frequency_factors);
    factors.resize(static_cast<size_t>(weight.cols));
    dequantize_row(weight.tensor->type, weight.tensor->data, factors.data(), weight.cols);
  }
  RopeTable table = make_rope_table(spec, factors.empty() ? nullptr : factors.data());
  const auto known = std::find(plan.rope_tables.begin(), plan.rope_tables.end(), table);
  if (known != plan.rope_tables.end()) return static_cast<int32_t>(known - plan.rope_tables.begin());
  plan.rope_tables.push_back(std::move(table));
  return static_cast<int32_t>(plan.rope_tables.size() - 1);
}

void Emitter::rope(const std::string& name, Operand x, const model::RopeSpec& spec, int64_t heads, int64_t head_dim,
                   int64_t offset, int32_t layer) {
  emit(name,
       ops::RopeDesc{.heads = heads, .head_dim = head_dim, .n_rot = spec.n_rot, .offset = offset, .neox = spec.neox},
       {.x = x, .rope_table = rope_table(plan_, model_, spec)}, layer);
}

void Emitter::store(const std::string& name, Operand x, int64_t width, bool value_cache, int32_t layer) {
  const DType type = value_cache ? plan_.kv_type_v : plan_.kv_type_k;
  emit(name, ops::KvStoreDesc{.width = width, .type = type}, {.x = x, .into_values = value_cache}, layer);
}

// ---- the model -----------------------------------------------------------------------------------------------------

void Emitter::feed_forward(const model::LayerSpec& layer, int32_t i) {
  Input h = normed(str_cat("blk.", i, ".ffn_norm"), residual_, layer.ffn_norm, model_.n_embd);
  if (layer.beside) {
    both_ffns(layer, i, h);
  } else if (layer.ffn.kind == model::FfnKind::moe) {
    moe_ffn(layer, i, h);
  } else {
    dense_ffn(layer, i, h);
  }
}

void Emitter::embed(Operand out) {
  emit("token_embd", ops::EmbedDesc{.type = type_of(model_.token_embd), .n = model_.n_embd},
       {.table = model_.token_embd,
        .out = out,
        .scale = static_cast<float>(model_.embedding_scale) * scale_of(model_.token_embd)},
       -1);
}

// The rows from the caller are read first, because their memory holds them only before the list starts.
void Emitter::draft_input() {
  const model::DraftInput& d = *model_.draft_input;
  const int64_t n = model_.n_embd;
  const auto eps = static_cast<float>(model_.norm_eps);
  const Operand rows = value("hidden_rows", n), both = value("draft_input", 2 * n), embedding = value("token_embd", n);
  list_.rows_in = rows.value;
  emit("hidden_norm", ops::NormDesc{.n = n}, {.x = rows, .weight = d.hidden_norm, .out = slice(both, n), .eps = eps},
       -1);
  embed(embedding);
  emit("embd_norm", ops::NormDesc{.n = n}, {.x = embedding, .weight = d.embd_norm, .out = both, .eps = eps}, -1);
  Input x{.f32 = both, .width = 2 * n, .name = "draft_input"};
  matmul("draft_projection", x, d.projection, kNone, residual_, {}, 1.0f, -1);
}

void Emitter::build() {
  residual_ = value("residual", model_.n_embd);
  list_.residual = residual_.value;
  if (model_.draft_input) {
    draft_input();
  } else {
    embed(residual_);
  }
  if (model_.layer_input > 0) layer_inputs();
  if (model_.embedding_norm) head_norm("token_embd_norm", residual_, kNone, 1, model_.n_embd, -1);

  for (size_t i = 0; i < model_.layers.size(); ++i) {
    const model::LayerSpec& layer = model_.layers[i];
    const auto index = static_cast<int32_t>(i);
    if (layer.is_recurrent()) {
      recurrent(layer, index);
    } else if (layer.has_attention() && layer.attention.kind == model::AttentionKind::mla) {
      mla(layer, index);
    } else if (layer.has_attention()) {
      gqa(layer, index);
    }
    if (layer.ffn.kind != model::FfnKind::none) feed_forward(layer, index);
    if (layer.input_gate != kNone) add_layer_input(layer, index);
  }

  Input h = normed("output_norm", residual_, model_.output_norm, model_.n_embd);
  // In the caller's memory; all lists share the value.
  Operand logits{.value = plan_.logits, .stride_bytes = model_.n_vocab * kF32};
  if (plan_.logits == kNoValue) logits = value("logits", model_.n_vocab);
  plan_.logits = logits.value;
  list_.hidden = f32_of(h, -1).value;
  matmul("output", h, model_.output, model_.output_bias, logits, {}, static_cast<float>(model_.logit_scale), -1);
  std::get<MatmulOperands>(list_.nodes.back().operands).softcap = static_cast<float>(model_.logit_softcap);
}

void Emitter::build_draw() {
  const Operand logits{.value = plan_.logits, .stride_bytes = model_.n_vocab * kF32};
  emit("sample", ops::SampleDesc{.n_vocab = model_.n_vocab}, {.logits = logits}, -1);
}

NodeList emit(Plan& plan, const model::ModelDesc& model) {
  NodeList list{.id = ListId::general};
  Emitter(plan, model, list).build();
  return list;
}

NodeList emit_streamed(Plan& plan, const model::ModelDesc& model) {
  NodeList list{.id = ListId::streamed};
  Emitter(plan, model, list).build();
  return list;
}

NodeList emit_draw(Plan& plan, const model::ModelDesc& model) {
  NodeList list{.id = ListId::draw};
  Emitter(plan, model, list).build_draw();
  return list;
}

}  // namespace dyno::plan
