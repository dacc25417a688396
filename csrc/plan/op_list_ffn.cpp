// The feed-forward part of a layer, dense or a mixture of experts.
#include "plan/op_list.h"

#include "core/error.h"
#include "ops/args.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

Operand OpList::up_gate(const std::string& name, const model::FfnSpec& f, Input& h, int32_t layer) {
  const model::Weight& gate = model_.weight(f.gate);
  const model::Weight& up = model_.weight(f.up);
  const ops::Layout layout = plan_.weights[static_cast<size_t>(f.gate)].layout;
  const Operand out = value(name, f.dense_width);
  if (gate.type == up.type && layout == plan_.weights[static_cast<size_t>(f.up)].layout) {
    const Source input = source(h, f.gate, layer);
    Node& node = emit(name,
                      ops::UpGateDesc{.type = gate.type,
                                      .layout = layout,
                                      .act = act_for(f.gate),
                                      .activation = f.activation,
                                      .n = f.dense_width,
                                      .k = gate.cols,
                                      .norm = input.norm},
                      layer);
    set_norm(node, input, h);
    node.x = input.x;
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

OpList::Routing OpList::route_experts(const model::FfnSpec& f, Input& h, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const Operand logits = value(p + "router", f.experts);
  matmul(p + "ffn_router", h, f.router, f.router_bias, logits, {}, 1.0f, i);
  const Routing routing = routing_values(f, i);
  Node& node = emit(p + "moe_route",
                    ops::MoeRouteDesc{.experts = f.experts,
                                      .used = f.used,
                                      .groups = f.groups,
                                      .groups_used = f.groups_used,
                                      .gating = f.gating,
                                      .normalize = f.normalize},
                    i);
  node.x = logits;
  node.ids = routing.ids;
  node.route_weights = routing.weights;
  node.w = f.selection_bias;
  node.scale = static_cast<float>(f.weights_scale);
  node.moe_index = moe_count_++;
  return routing;
}

OpList::Routing OpList::routing_values(const model::FfnSpec& f, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const size_t row_ints = static_cast<size_t>(ops::moe_workspace_ints(1, f.used, f.experts) -
                                              ops::moe_workspace_ints(0, f.used, f.experts));
  const size_t fixed_ints = static_cast<size_t>(ops::moe_workspace_ints(0, f.used, f.experts));
  return {value_bytes(p + "expert_ids", static_cast<size_t>(f.used) * sizeof(int32_t)),
          value(p + "expert_weights", f.used),
          value_bytes(p + "moe_workspace", row_ints * sizeof(int32_t), fixed_ints * sizeof(int32_t))};
}

Operand OpList::experts_up_gate(const model::FfnSpec& f, Input& h, const Routing& routing, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const Operand hidden = value(p + "moe_up_gate", f.used * f.width);
  const auto layout_of = [&](WeightId w) { return plan_.weights[static_cast<size_t>(w)].layout; };
  const model::Weight& gate = model_.weight(f.experts_gate);
  if (gate.type == model_.weight(f.experts_up).type && layout_of(f.experts_gate) == layout_of(f.experts_up)) {
    const Source input = source(h, f.experts_gate, i);
    Node& node = emit(p + "moe_up_gate",
                      ops::MoeUpGateDesc{.type = gate.type,
                                         .layout = layout_of(f.experts_gate),
                                         .act = act_for(f.experts_gate),
                                         .activation = f.activation,
                                         .n = f.width,
                                         .k = gate.cols,
                                         .experts = f.experts,
                                         .used = f.used,
                                         .norm = input.norm},
                      i);
    set_norm(node, input, h);
    node.x = input.x;
    node.y = hidden;
    node.w = f.experts_gate;
    node.w2 = f.experts_up;
    node.bias = f.experts_gate_bias;
    node.bias2 = f.experts_up_bias;
    node.ids = routing.ids;
    node.workspace = routing.workspace;
    return hidden;
  }
  const Operand g = value(p + "moe_gate", f.used * f.width);
  for (const bool is_gate : {true, false}) {
    const WeightId w = is_gate ? f.experts_gate : f.experts_up;
    const ops::ActType act = act_for(w);
    const Operand input = as(act, h, i);
    Node& node = emit(p + (is_gate ? "moe_gate" : "moe_up"),
                      ops::MatmulIdDesc{.type = model_.weight(w).type,
                                        .layout = layout_of(w),
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
    node.ids = routing.ids;
    node.workspace = routing.workspace;
  }
  Node& node = emit(p + "moe_glu", ops::GluDesc{.n = f.used * f.width, .activation = f.activation}, i);
  node.gate = g;
  node.x = hidden;
  node.y = hidden;
  return hidden;
}

void OpList::experts_down(const model::FfnSpec& f, Operand hidden, const Routing& routing, int32_t i) {
  const std::string p = str_cat("blk.", i, ".");
  const model::Weight& down = model_.weight(f.experts_down);
  const ops::ActType act = act_for(f.experts_down);
  Operand rows = hidden;
  rows.stride_bytes = f.width * kF32;
  Input down_in{.f32 = rows, .width = f.width, .rows_factor = static_cast<int32_t>(f.used), .name = p + "moe_up_gate"};
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
  node.ids = routing.ids;
  node.workspace = routing.workspace;

  Node& sum = emit(p + "moe_sum", ops::MoeSumDesc{.n = model_.n_embd, .used = f.used}, i);
  sum.x = out;
  sum.route_weights = routing.weights;
  sum.residual = residual_;
  sum.y = residual_;
  sum.scale = static_cast<float>(model_.residual_scale);
}

void OpList::moe_ffn(const model::LayerSpec& layer, int32_t i, Input& h) {
  const model::FfnSpec& f = layer.ffn;
  const std::string p = str_cat("blk.", i, ".");
  DYNO_CHECK(UnsupportedError, layer.ffn_post_norm == kNone, "[plan] layer ", i,
             ": a norm after a mixture of experts is not supported");
  const Routing routing = route_experts(f, h, i);
  const Operand hidden = experts_up_gate(f, h, routing, i);
  Operand shared;
  const auto shared_up_gate = [&] { shared = up_gate(p + "ffn_shared_up_gate", f, h, i); };
  // Where products norm their rows themselves, the shared experts' must read the residual stream before the others
  // are added to it; else they come last, when the memory of the experts' rows is free.
  const bool first = f.dense_width > 0 && !h.f32;
  if (first) shared_up_gate();
  experts_down(f, hidden, routing, i);
  if (f.dense_width == 0) return;
  if (!first) shared_up_gate();
  Input down{.f32 = shared, .width = f.dense_width, .name = p + "ffn_shared_up_gate"};
  matmul(p + "ffn_shared_down", down, f.down, f.down_bias, residual_, residual_,
         static_cast<float>(model_.residual_scale), i);
}

}  // namespace dyno::plan
