// The feed-forward part of a layer, dense or a mixture of experts.
#include "plan/passes/emit.h"

#include <cmath>

#include "core/error.h"
#include "ops/args.h"
#include "plan/expert_cache.h"
#include "plan/expert_share.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

bool Emitter::stand_alike(WeightId a, WeightId b) const {
  return type_of(a) == type_of(b) && layout_of(a) == layout_of(b) && device_of(a) == device_of(b);
}

bool Emitter::stand_together(WeightId a, WeightId b) const { return device_of(a) == device_of(b); }

Operand Emitter::up_gate(const std::string& name, const model::FfnSpec& f, Input& h, int32_t layer) {
  const Operand out = value(name, f.dense_width);
  const ops::GluDesc glu{.n = f.dense_width, .activation = f.activation};
  if (f.gate == kNone) {
    matmul(name + " (up)", h, f.up, f.up_bias, out, {}, 1.0f, layer);
    emit(name + " (glu)", glu, {.gate = out, .up = out, .y = out}, layer);
    return out;
  }
  const model::Weight& gate = model_.weight(f.gate);
  const ops::Layout layout = layout_of(f.gate);
  if (stand_alike(f.gate, f.up) && !scaled(f.gate) && !scaled(f.up)) {
    emit(name,
         ops::UpGateDesc{.type = type_of(f.gate),
                         .layout = layout,
                         .act = act_for(f.gate),
                         .activation = f.activation,
                         .n = f.dense_width,
                         .k = gate.cols},
         {.x = source(h, f.gate, layer),
          .w_gate = f.gate,
          .w_up = f.up,
          .bias_gate = f.gate_bias,
          .bias_up = f.up_bias,
          .y = out},
         layer);
    return out;
  }
  // The weights differ in type (mixed quantisations) or device, or have factors: two products, then the activation.
  const Operand g = value(name + " (gate)", f.dense_width);
  matmul(name + " (gate)", h, f.gate, f.gate_bias, g, {}, 1.0f, layer);
  matmul(name + " (up)", h, f.up, f.up_bias, out, {}, 1.0f, layer);
  emit(name + " (glu)", glu, {.gate = g, .up = out, .y = out}, layer);
  return out;
}

void Emitter::dense_ffn(const model::LayerSpec& layer, int32_t i, Input& h) {
  const std::string p = str_cat("blk.", i, ".");
  Input hidden{
      .f32 = up_gate(p + "ffn_up_gate", layer.ffn, h, i), .width = layer.ffn.dense_width, .name = p + "ffn_up_gate"};
  project(p + "ffn_down", hidden, layer.ffn.down, layer.ffn.down_bias, layer.ffn_post_norm, p + "ffn_post_norm", i,
          layer.input_gate == kNone ? layer.output_scale : 1.0);
}

void Emitter::both_ffns(const model::LayerSpec& layer, int32_t i, Input& h) {
  const std::string p = str_cat("blk.", i, ".");
  const model::FfnSpec& f = *layer.beside;
  const auto eps = static_cast<float>(model_.norm_eps);
  Input hidden{
      .f32 = up_gate(p + "ffn_up_gate", layer.ffn, h, i), .width = layer.ffn.dense_width, .name = p + "ffn_up_gate"};
  const Operand sum = value(p + "ffn_dense", model_.n_embd), mixed = value(p + "ffn_experts", model_.n_embd);
  matmul(p + "ffn_down", hidden, layer.ffn.down, layer.ffn.down_bias, sum, {}, 1.0f, i);
  emit(p + "ffn_own_norm", ops::NormDesc{.n = model_.n_embd},
       {.x = sum, .weight = layer.ffn_own_norm, .out = sum, .eps = eps}, i);
  Input routed = normed(p + "router_norm", residual_, f.router_norm, model_.n_embd);
  const Routing routing = route_experts(f, routed, i);
  Input x = normed(p + "beside_norm", residual_, layer.beside_norm, model_.n_embd);
  experts(f, x, routing, {}, mixed, i);
  emit(p + "beside_own_norm", ops::NormDesc{.n = model_.n_embd, .add = true},
       {.x = mixed, .weight = layer.beside_own_norm, .residual = sum, .out = sum, .eps = eps}, i);
  emit(p + "ffn_post_norm", ops::NormDesc{.n = model_.n_embd, .add = true},
       {.x = sum,
        .weight = layer.ffn_post_norm,
        .residual = residual_,
        .out = residual_,
        .eps = eps,
        .scale = static_cast<float>(layer.input_gate == kNone ? layer.output_scale : 1.0)},
       i);
}

void Emitter::layer_inputs() {
  const int64_t width = model_.layer_input, layers = model_.n_layers;
  const Operand table = value("layer_embd", layers * width);
  emit("layer_embd", ops::EmbedDesc{.type = type_of(model_.layer_embd), .n = layers * width},
       {.table = model_.layer_embd, .out = table, .scale = static_cast<float>(std::sqrt(static_cast<double>(width)))},
       -1);
  layer_inputs_ = value("layer_inputs", layers * width);
  Input x{.f32 = residual_, .width = model_.n_embd, .name = "token_embd"};
  matmul("layer_proj", x, model_.layer_proj, kNone, layer_inputs_, {},
         static_cast<float>(1.0 / std::sqrt(static_cast<double>(model_.n_embd))), -1);
  emit("layer_proj_norm", ops::NormDesc{.n = width, .rows_per_token = layers, .add = true},
       {.x = layer_inputs_,
        .weight = model_.layer_proj_norm,
        .residual = table,
        .out = layer_inputs_,
        .eps = static_cast<float>(model_.norm_eps),
        .scale = static_cast<float>(std::sqrt(0.5))},
       -1);
}

void Emitter::add_layer_input(const model::LayerSpec& layer, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const int64_t width = model_.layer_input;
  const Operand gated = value(p + "layer_input", width);
  Input h{.f32 = residual_, .width = model_.n_embd, .name = p + "residual"};
  matmul(p + "layer_input_gate", h, layer.input_gate, kNone, gated, {}, 1.0f, i);
  emit(p + "layer_input_glu", ops::GluDesc{.n = width, .activation = ops::Activation::gelu_tanh},
       {.gate = gated, .up = slice(layer_inputs_, i * width), .y = gated}, i);
  Input u{.f32 = gated, .width = width, .name = p + "layer_input"};
  project(p + "layer_input_up", u, layer.input_up, kNone, layer.input_norm, p + "layer_input_norm", i,
          layer.output_scale);
}

Emitter::Routing Emitter::route_experts(const model::FfnSpec& f, Input& h, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const Operand logits = value(p + "router", f.experts);
  matmul(p + "ffn_router", h, f.router, f.router_bias, logits, {}, static_cast<float>(f.router_scale), i);
  const Routing routing = routing_values(f, "", i);
  emit(p + "moe_route",
       ops::MoeRouteDesc{.experts = f.experts,
                         .used = f.used,
                         .groups = f.groups,
                         .groups_used = f.groups_used,
                         .gating = f.gating,
                         .normalize = f.normalize},
       {.logits = logits,
        .selection_bias = f.selection_bias,
        .scale = static_cast<float>(f.weights_scale),
        // A factor of an expert's down product becomes a factor of its weight in the sum.
        .expert_scale = f.expert_scale != kNone ? f.expert_scale : model_.weight(f.experts_down).scales,
        .moe_index = moe_count_++,
        .ids = routing.ids,
        .weights = routing.weights},
       i);
  return routing;
}

Emitter::Routing Emitter::routing_values(const model::FfnSpec& f, const char* suffix, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const size_t row_ints = static_cast<size_t>(ops::moe_workspace_ints(1, f.used, f.experts) -
                                              ops::moe_workspace_ints(0, f.used, f.experts));
  const size_t fixed_ints = static_cast<size_t>(ops::moe_workspace_ints(0, f.used, f.experts));
  return {value_bytes(p + "expert_ids" + suffix, static_cast<size_t>(f.used) * sizeof(int32_t)),
          value(p + "expert_weights" + suffix, f.used),
          value_bytes(p + "moe_workspace" + suffix, row_ints * sizeof(int32_t), fixed_ints * sizeof(int32_t))};
}

Operand Emitter::experts_up_gate(const model::FfnSpec& f, Input& h, const Routing& routing, const char* suffix,
                                 int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const Operand hidden = value(p + "moe_up_gate" + suffix, f.used * f.width);
  const bool gated = f.experts_gate != kNone;
  const model::Weight& gate = model_.weight(gated ? f.experts_gate : f.experts_up);
  if (gated && stand_alike(f.experts_gate, f.experts_up) && !scaled(f.experts_gate) && !scaled(f.experts_up)) {
    emit(p + "moe_up_gate" + suffix,
         ops::MoeUpGateDesc{.type = type_of(f.experts_gate),
                            .layout = layout_of(f.experts_gate),
                            .act = act_for(f.experts_gate),
                            .activation = f.activation,
                            .n = f.width,
                            .k = gate.cols,
                            .experts = f.experts,
                            .used = f.used},
         {.x = source(h, f.experts_gate, i),
          .w_gate = f.experts_gate,
          .w_up = f.experts_up,
          .bias_gate = f.experts_gate_bias,
          .bias_up = f.experts_up_bias,
          .ids = routing.ids,
          .y = hidden,
          .workspace = routing.workspace},
         i);
    return hidden;
  }
  const Operand g = gated ? value(p + "moe_gate" + suffix, f.used * f.width) : hidden;
  for (const bool is_gate : {true, false}) {
    if (is_gate && !gated) continue;
    const WeightId w = is_gate ? f.experts_gate : f.experts_up;
    const ops::ActType act = act_for(w);
    const Operand input = as(act, h, i);
    emit(p + (is_gate ? "moe_gate" : "moe_up") + suffix,
         ops::MatmulIdDesc{.type = type_of(w),
                           .layout = layout_of(w),
                           .act = act,
                           .n = f.width,
                           .k = gate.cols,
                           .experts = f.experts,
                           .used = f.used},
         {.x = input,
          .w = w,
          .bias = is_gate ? f.experts_gate_bias : f.experts_up_bias,
          .ids = routing.ids,
          .y = is_gate ? g : hidden,
          .workspace = routing.workspace},
         i);
  }
  ops::GluDesc glu{.n = f.used * f.width, .activation = f.activation};
  GluOperands operands{.gate = g, .up = hidden, .y = hidden};
  const WeightId up_scale = model_.weight(f.experts_up).scales;
  if (gate.scales != kNone || up_scale != kNone) {
    glu.experts = f.experts;
    glu.used = f.used;
    operands.ids = routing.ids;
    operands.gate_scale = gate.scales;
    operands.up_scale = up_scale;
  }
  emit(p + "moe_glu" + suffix, glu, operands, i);
  return hidden;
}

Operand Emitter::experts_down(const model::FfnSpec& f, Operand hidden, const Routing& routing, const char* suffix,
                              int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const ops::ActType act = act_for(f.experts_down);
  Operand rows = hidden;
  rows.stride_bytes = f.width * kF32;
  Input down_in{
      .f32 = rows, .width = f.width, .rows_factor = static_cast<int32_t>(f.used), .name = p + "moe_up_gate" + suffix};
  const Operand input = as(act, down_in, i);
  const Operand out = value(p + "moe_down" + suffix, f.used * model_.n_embd);
  emit(p + "moe_down" + suffix,
       ops::MatmulIdDesc{.type = type_of(f.experts_down),
                         .layout = layout_of(f.experts_down),
                         .act = act,
                         .n = model_.n_embd,
                         .k = f.width,
                         .experts = f.experts,
                         .used = f.used,
                         .x_per_slot = true},
       {.x = input,
        .w = f.experts_down,
        .bias = f.experts_down_bias,
        .ids = routing.ids,
        .y = out,
        .workspace = routing.workspace},
       i);
  return out;
}

void Emitter::experts(const model::FfnSpec& f, Input& h, const Routing& routing, Operand residual, Operand total,
                      int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const auto scale = static_cast<float>(model_.residual_scale);
  const ops::MoeSumDesc desc{.n = model_.n_embd, .used = f.used};
  if (!f.cached.experts.empty() && !stand_together(f.experts_down, f.router)) {
    divided_experts(f, h, routing, residual, total, i);
    return;
  }
  if (list_.id == ListId::streamed && shares_experts(plan_, model_, f) && stand_together(f.experts_down, f.router)) {
    shared_experts(f, h, routing, residual, total, i);
    return;
  }
  const Operand out = experts_down(f, experts_up_gate(f, h, routing, "", i), routing, "", i);
  if (!residual || stand_together(f.experts_down, f.router)) {
    emit(p + "moe_sum", desc,
         {.x = out, .weights = routing.weights, .residual = residual, .scale = scale, .out = total}, i);
    return;
  }
  // The residual stream stays on its device, and one row per token moves instead of one per expert. A sum of one slot
  // adds exactly the same as a sum with a residual.
  const Operand sum = value(p + "moe_out", model_.n_embd);
  emit(p + "moe_sum", desc, {.x = out, .weights = routing.weights, .out = sum}, i);
  emit(p + "moe_add", ops::MoeSumDesc{.n = model_.n_embd, .used = 1},
       {.x = sum, .residual = residual, .scale = scale, .out = total}, i);
}

// The main device multiplies by the experts that it has, and the CPU by the others. The rows of both are added in the
// order of the slots, as on one device, so the rows of the CPU move individually. Pass hoist moves the main device's
// products before the CPU's turn.
void Emitter::divided_experts(const model::FfnSpec& f, Input& h, const Routing& routing, Operand residual,
                              Operand total, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  model::FfnSpec cached = f;
  cached.experts = static_cast<int64_t>(f.cached.experts.size());
  cached.experts_gate = f.cached.gate;
  cached.experts_up = f.cached.up;
  cached.experts_down = f.cached.down;
  cached.experts_gate_bias = f.cached.gate_bias;
  cached.experts_up_bias = f.cached.up_bias;
  cached.experts_down_bias = f.cached.down_bias;
  const size_t id_bytes = static_cast<size_t>(f.used) * sizeof(int32_t);
  Routing here = routing_values(cached, " (cached)", i);
  Routing there = routing;
  there.ids = value_bytes(p + "expert_ids (not cached)", id_bytes);
  emit(p + "moe_split", ops::MoeSplitDesc{.experts = f.experts, .used = f.used},
       {.ids = routing.ids, .place_table = i, .here = here.ids, .there = there.ids}, i);
  const double share = cached_share(plan_, model_, i);
  const Operand others = divided_products(f, h, there, "", 1 - share, i);
  const Operand own = divided_products(cached, h, here, " (cached)", share, i);
  emit(p + "moe_sum", ops::MoeSumDesc{.n = model_.n_embd, .used = f.used},
       {.x = own,
        .other_x = others,
        .other_ids = there.ids,
        .weights = routing.weights,
        .residual = residual,
        .scale = static_cast<float>(model_.residual_scale),
        .out = total},
       i);
}

Operand Emitter::divided_products(const model::FfnSpec& f, Input& h, const Routing& routing, const char* suffix,
                                  double share, int32_t i) {
  const size_t first = list_.nodes.size();
  const Operand rows = experts_down(f, experts_up_gate(f, h, routing, suffix, i), routing, suffix, i);
  for (size_t at = first; at < list_.nodes.size(); ++at) {
    Node& node = list_.nodes[at];
    node.at_home = home_;
    node.divided = operands_of<MoeUpGateOperands>(node) != nullptr || operands_of<MatmulIdOperands>(node) != nullptr;
    if (node.divided) node.share = share;
  }
  return rows;
}

// The experts of the CPU are known only after routing, so the cost model estimates the shares of the nodes. Each device
// adds its own slots, and one row per token moves. This changes the order of additions compared with one device. To
// keep that order, a row for each slot would have to move: for a large u-batch, as many bytes as the experts
// themselves.
void Emitter::shared_experts(const model::FfnSpec& f, Input& h, const Routing& routing, Operand residual, Operand total,
                             int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const auto scale = static_cast<float>(model_.residual_scale);
  plan_.shared_experts[static_cast<size_t>(i)] = f.experts;
  Routing here = routing_values(f, " (copies)", i), there = routing_values(f, " (CPU)", i);
  emit(p + "moe_split", ops::MoeSplitDesc{.experts = f.experts, .used = f.used},
       {.ids = routing.ids, .place_table = plan_.shared_table(i), .here = here.ids, .there = there.ids}, i);
  const ops::MoeSumDesc desc{.n = model_.n_embd, .used = f.used};
  const Operand sum = value(p + "moe_out (CPU)", model_.n_embd);
  const size_t first = list_.nodes.size();
  Input rows = h;  // the CPU's share needs its own quantised rows, because they may be skipped
  home_ = true;
  const Operand others = divided_products(f, rows, there, " (CPU)", 1, i);
  home_ = false;
  emit(p + "moe_sum (CPU)", desc, {.x = others, .weights = routing.weights, .out = sum}, i);
  for (size_t at = first; at < list_.nodes.size(); ++at) list_.nodes[at].for_cpu_share = true;
  const Operand own = divided_products(f, h, here, "", 1, i);
  emit(p + "moe_sum", desc,
       {.x = own,
        .other_ids = there.ids,
        .weights = routing.weights,
        .residual = residual,
        .scale = scale,
        .out = total},
       i);
  emit(p + "moe_add", ops::MoeSumDesc{.n = model_.n_embd, .used = 1},
       {.x = sum, .residual = total, .scale = scale, .out = total}, i)
      .for_cpu_share = true;
}

void Emitter::moe_ffn(const model::LayerSpec& layer, int32_t i, Input& h) {
  const model::FfnSpec& f = layer.ffn;
  const std::string p = str_cat("blk.", i, ".");
  DYNO_CHECK(UnsupportedError, layer.ffn_post_norm == kNone, "[plan] layer ", i,
             ": a norm after a mixture of experts is not supported");
  const Routing routing = route_experts(f, h, i);
  experts(f, h, routing, residual_, residual_, i);
  if (f.dense_width == 0) return;
  // The shared experts come last, when the memory of the other experts' rows is free.
  Operand gate;
  if (f.shared_gate != kNone) {
    gate = value(p + "ffn_shared_gate", 1);
    matmul(p + "ffn_shared_gate", h, f.shared_gate, kNone, gate, {}, 1.0f, i);
  }
  const Operand shared = up_gate(p + "ffn_shared_up_gate", f, h, i);
  if (gate) {
    emit(p + "ffn_shared_gated", ops::SigmoidGateDesc{.n = f.dense_width, .gates = 1},
         {.x = shared, .gate = gate, .y = shared}, i);
  }
  Input down{.f32 = shared, .width = f.dense_width, .name = p + "ffn_shared_up_gate"};
  matmul(p + "ffn_shared_down", down, f.down, f.down_bias, residual_, residual_,
         static_cast<float>(model_.residual_scale), i);
}

}  // namespace dyno::plan
