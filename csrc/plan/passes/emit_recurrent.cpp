// Layers with recurrent state: from the residual stream to the rows that they add to it.
#include <algorithm>

#include "core/error.h"
#include "ops/args.h"
#include "plan/passes/emit.h"

namespace dyno::plan {

using model::kNone;

// Lists that are emitted one after the other share their states, as a sequence may pass from one list to another.
int32_t Emitter::state(const std::string& name, int64_t elements) {
  const auto same = std::ranges::find(plan_.states, name, &State::name);
  const auto index = static_cast<int32_t>(same - plan_.states.begin());
  if (same == plan_.states.end()) plan_.states.push_back({.name = name, .elements = elements});
  return index;
}

void Emitter::recurrent(const model::LayerSpec& layer, int32_t i) {
  Input h = normed(str_cat("blk.", i, ".attn_norm"), residual_, layer.attn_norm, model_.n_embd);
  if (layer.recurrent.kind == model::RecurrentKind::linear) {
    linear(layer, i, h);
  } else {
    short_conv(layer, i, h);
  }
}

// A convolution of `n` channels with SiLU, with its own state.
Operand Emitter::convolve(const model::RecurrentSpec& r, const std::string& name, Operand x, model::WeightId w,
                          int64_t n, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const Operand y = value(p + name, n);
  const ops::ShortConvDesc conv{.n = n, .taps = r.taps, .silu = true};
  emit(p + name, conv,
       {.x = x, .w = w, .bias = r.conv_bias, .state_index = state(p + name + "_state", conv.state_elements()), .y = y},
       i);
  return y;
}

Operand Emitter::product(const std::string& name, Input& x, model::WeightId w, int32_t i) {
  const Operand y = value(name, model_.weight(w).rows);
  matmul(name, x, w, kNone, y, {}, 1.0f, i);
  return y;
}

// A product, preceded by a low-rank matrix if there is one.
Operand Emitter::low_rank_product(const std::string& name, Input& x, model::WeightId low, model::WeightId w,
                                  int32_t i) {
  if (low == kNone) return product(name, x, w, i);
  Input between{.f32 = product(name + "_low", x, low, i), .width = model_.weight(low).rows, .name = name + "_low"};
  return product(name, between, w, i);
}

Emitter::LinearInputs Emitter::linear_inputs(const model::RecurrentSpec& r, Input& h, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const int64_t keys = r.k_heads * r.dk, values = r.v_heads * r.dv, channels = 2 * keys + values;
  if (r.rule == ops::LinearRule::additive) {
    const Operand in = product(p + "linear_in", h, r.in, i);
    const Operand mixed = convolve(r, "short_conv", slice(in, values), r.conv, channels, i);
    return {.q = slice(mixed, values + keys),
            .k = slice(mixed, values),
            .v = mixed,
            .step = slice(in, values + channels),
            .gate = in};
  }
  LinearInputs x;
  if (r.in_k != kNone) {
    const Operand q = product(p + "linear_q", h, r.in, i), k = product(p + "linear_k", h, r.in_k, i);
    const Operand v = product(p + "linear_v", h, r.in_v, i);
    x.q = convolve(r, "short_conv_q", q, r.conv, keys, i);
    x.k = convolve(r, "short_conv_k", k, r.conv_k, keys, i);
    x.v = convolve(r, "short_conv_v", v, r.conv_v, values, i);
  } else {
    const Operand in = product(p + "linear_in", h, r.in, i);
    x.q = convolve(r, "short_conv", in, r.conv, channels, i);
    x.k = slice(x.q, keys);
    x.v = slice(x.q, 2 * keys);
  }
  x.gate = low_rank_product(p + "linear_gate", h, r.gate_low, r.gate, i);
  x.step = low_rank_product(p + "linear_step", h, r.step_low, r.step, i);
  x.beta = product(p + "linear_beta", h, r.beta, i);
  return x;
}

void Emitter::linear(const model::LayerSpec& layer, int32_t i, Input& h) {
  const model::RecurrentSpec& r = layer.recurrent;
  const std::string p = str_cat("blk.", i, ".");
  const int64_t values = r.v_heads * r.dv;
  const auto eps = static_cast<float>(model_.norm_eps);
  const LinearInputs x = linear_inputs(r, h, i);
  const ops::LinearAttentionDesc attention{.k_heads = r.k_heads,
                                           .v_heads = r.v_heads,
                                           .dk = r.dk,
                                           .dv = r.dv,
                                           .rule = r.rule,
                                           .grouped = r.grouped,
                                           .channel_decay = r.channel_decay};
  const Operand out = value(p + "linear_attention", values);
  emit(p + "linear_attention", attention,
       {.q = x.q,
        .k = x.k,
        .v = x.v,
        .step = x.step,
        .beta = x.beta,
        .decay = r.decay,
        .step_bias = r.step_bias,
        .skip = r.skip,
        .eps = eps,
        .state_index = state(p + "linear_state", attention.state_elements()),
        .out = out},
       i);
  const auto norm = [&] {
    const int64_t n = values / r.norm_rows;
    emit(p + "linear_norm", ops::NormDesc{.n = n, .rows_per_token = r.norm_rows},
         {.x = out, .weight = r.norm, .out = out, .eps = eps, .weight_stride = r.norm_shared ? 0 : n}, i);
  };
  if (!r.gate_first) norm();
  if (r.sigmoid_gate) {
    emit(p + "linear_gated", ops::SigmoidGateDesc{.n = values, .gates = values}, {.x = out, .gate = x.gate, .y = out},
         i);
  } else {
    emit(p + "linear_gated", ops::GluDesc{.n = values, .activation = ops::Activation::silu},
         {.gate = x.gate, .up = out, .y = out}, i);
  }
  if (r.gate_first) norm();
  Input o{.f32 = out, .width = values, .name = p + "linear_attention"};
  project(p + "linear_out", o, r.output, kNone, layer.attn_post_norm, p + "attn_post_norm", i);
}

void Emitter::short_conv(const model::LayerSpec& layer, int32_t i, Input& h) {
  const model::RecurrentSpec& r = layer.recurrent;
  const std::string p = str_cat("blk.", i, ".");
  const int64_t n = model_.n_embd;
  const Operand in = value(p + "conv_in", 3 * n), out = value(p + "short_conv", n);
  matmul(p + "conv_in", h, r.in, kNone, in, {}, 1.0f, i);
  const ops::ShortConvDesc conv{.n = n, .taps = r.taps, .gated = true};
  emit(p + "short_conv", conv,
       {.x = slice(in, 2 * n),
        .before = in,
        .after = slice(in, n),
        .w = r.conv,
        .state_index = state(p + "conv_state", conv.state_elements()),
        .y = out},
       i);
  Input o{.f32 = out, .width = n, .name = p + "short_conv"};
  project(p + "conv_out", o, r.output, kNone, layer.attn_post_norm, p + "attn_post_norm", i);
}

}  // namespace dyno::plan
