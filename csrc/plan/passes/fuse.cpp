// The op list for few tokens: the same layers in fewer, larger launches, for devices on which a launch costs more than
// a small op. Nodes that no fused launch covers stay as they are.
#include <algorithm>
#include <optional>

#include "core/error.h"
#include "ops/matmul/byte_rows.h"
#include "plan/passes/passes.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

bool has_plain_attention(const model::LayerSpec& spec) {
  const model::AttentionSpec& a = spec.attention;
  return spec.has_attention() && a.shared_kv < 0;
}

bool fused_takes(const DeviceInfo& device, const ops::OpDesc& desc, std::initializer_list<int64_t> numbers) {
  if (device.kind != DeviceKind::cuda) return false;
  for (const int64_t tokens : numbers) {
    const ops::OpDesc d = ops::with_tokens(desc, tokens);
    if (!ops::supports(d, ops::default_config(d, device), device)) return false;
  }
  return true;
}

bool stand_together(const Plan& plan, std::initializer_list<WeightId> weights) {
  DeviceId device = -1;
  for (const WeightId id : weights) {
    if (id == kNone) continue;
    const DeviceId one = plan.weights[static_cast<size_t>(id)].device;
    if (device >= 0 && one != device) return false;
    device = one;
  }
  return true;
}

std::optional<ops::QkvDesc> qkv_desc(const Plan& plan, const model::ModelDesc& model, const model::AttentionSpec& a) {
  if (a.kind == model::AttentionKind::mla || a.qkv != kNone || a.v_is_k || !stand_together(plan, {a.q, a.k, a.v})) {
    return std::nullopt;
  }
  const ops::Layout layout = plan.weights[static_cast<size_t>(a.q)].layout;
  for (const WeightId w : {a.q, a.k, a.v}) {
    if (plan.weights[static_cast<size_t>(w)].layout != layout || model.weight(w).scale != 1.0) return std::nullopt;
  }
  return ops::QkvDesc{.type = plan.type_of(a.q),
                      .type_k = plan.type_of(a.k),
                      .type_v = plan.type_of(a.v),
                      .layout = layout,
                      .n = model.weight(a.q).rows,
                      .n_k = model.weight(a.k).rows,
                      .n_v = model.weight(a.v).rows,
                      .k = model.weight(a.q).cols};
}

void merge_qkv(Nodes& nodes, int32_t layer, const model::AttentionSpec& a, const ops::QkvDesc& desc) {
  const size_t at = find_node<MatmulOperands>(nodes, layer_span(nodes, layer),
                                              [&](const MatmulOperands& o) { return o.w.id == a.q; });
  const auto& q = *operands_of<MatmulOperands>(nodes[at]);
  const auto& k = *operands_of<MatmulOperands>(nodes[at + 1]);
  const auto& v = *operands_of<MatmulOperands>(nodes[at + 2]);
  replace_nodes(nodes, {at, at + 3},
                make_node(str_cat("blk.", layer, ".attn_qkv"), layer, desc,
                          {.x = q.x,
                           .w_q = q.w,
                           .w_k = k.w,
                           .w_v = v.w.id,
                           .bias_q = q.bias,
                           .bias_k = k.bias,
                           .bias_v = v.bias,
                           .q = q.y,
                           .k = k.y,
                           .v = v.y}));
}

std::optional<ops::QkvDesc> pair_desc(const Plan& plan, const model::ModelDesc& model, WeightId first,
                                      WeightId second) {
  const model::Weight &a = model.weight(first), &b = model.weight(second);
  const ops::Layout layout = plan.weights[static_cast<size_t>(first)].layout;
  if (plan.weights[static_cast<size_t>(second)].layout != layout || !stand_together(plan, {first, second}) ||
      a.scale != 1.0 || b.scale != 1.0) {
    return std::nullopt;
  }
  return ops::QkvDesc{.type = plan.type_of(first),
                      .type_k = plan.type_of(second),
                      .type_v = plan.type_of(first),
                      .layout = layout,
                      .n = a.rows,
                      .n_k = b.rows,
                      .k = a.cols};
}

void merge_pair(Nodes& nodes, int32_t layer, WeightId first, const char* suffix, const ops::QkvDesc& desc) {
  const size_t at = find_node<MatmulOperands>(nodes, layer_span(nodes, layer),
                                              [&](const MatmulOperands& o) { return o.w.id == first; });
  const auto& q = *operands_of<MatmulOperands>(nodes[at]);
  const auto& k = *operands_of<MatmulOperands>(nodes[at + 1]);
  replace_nodes(nodes, {at, at + 2},
                make_node(nodes[at].name + suffix, layer, desc,
                          {.x = q.x, .w_q = q.w, .w_k = k.w, .bias_q = q.bias, .bias_k = k.bias, .q = q.y, .k = k.y}));
}

bool reads(const Node& node, ValueId value) {
  bool found = false;
  for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
    found |= operand.value == value && operand.kUse != Access::write;
  });
  return found;
}
bool writes(const Node& node, ValueId value) {
  bool found = false;
  for_each_operand(node.operands, [&](std::string_view, const auto& operand) {
    found |= operand.value == value && operand.kUse != Access::read;
  });
  return found;
}

bool same_rows(const Operand& a, const Operand& b) {
  return a.value == b.value && a.offset_bytes == b.offset_bytes && a.stride_bytes == b.stride_bytes;
}

bool alike(const Plan& plan, WeightId a, WeightId b) {
  const WeightPlacement& first = plan.weights[static_cast<size_t>(a)];
  const WeightPlacement& second = plan.weights[static_cast<size_t>(b)];
  return first.type == second.type && first.layout == second.layout && first.device == second.device;
}

void norm_inside(Node& node, const NormOperands& norm) {
  std::visit(
      [&]<typename O>(O& o) {
        if constexpr (requires { requires std::is_same_v<decltype(o.norm), NormOfRows>; }) {
          o.x = norm.x;
          o.norm = {.weight = norm.weight, .eps = norm.eps};
        }
      },
      node.operands);
  std::visit(
      [](auto& d) {
        if constexpr (requires { d.norm; }) d.norm = true;
      },
      node.desc);
}

void fold_norms(Nodes& nodes, const std::function<bool(Node&, const NormOperands&)>& norms_rows) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    const auto* norm = operands_of<NormOperands>(nodes[i]);
    const auto* desc = std::get_if<ops::NormDesc>(&nodes[i].desc);
    if (norm == nullptr || desc->add || desc->centred || desc->rows_per_token > 1 || norm->x.value == norm->out.value)
      continue;
    if (norm->scale != 1.0f) continue;
    // The norm writes a part of wider rows, and the reader reads more than this part.
    if (norm->out.stride_bytes != desc->n * static_cast<int64_t>(sizeof(float))) continue;
    const NormOperands folded = *norm;
    size_t place = i + 1;
    bool read = false;  // from `place` on
    for (size_t at = i + 1; at < nodes.size() && !read; ++at) {
      if (reads(nodes[at], folded.out.value)) {
        if (place == at && norms_rows(nodes[at], folded)) {
          ++place;
          continue;
        }
        read = true;
      } else if (place == at && !writes(nodes[at], folded.x.value)) {
        ++place;
      }
    }
    if (!read) {
      nodes.erase(nodes.begin() + static_cast<std::ptrdiff_t>(i));
      --i;
    } else if (place > i + 1) {
      const auto from = nodes.begin() + static_cast<std::ptrdiff_t>(i);
      std::rotate(from, from + 1, nodes.begin() + static_cast<std::ptrdiff_t>(place));
      nodes[place].beside = false;
      --i;
    }
  }
}

namespace {

// Every block of a product computes its norm. For the many blocks of an output matrix, a separate launch is cheaper.
constexpr int64_t kMostNormedRows = 32768;

class Fuse {
 public:
  // `kept`: rows that have another reader, so no product may compute their norm.
  Fuse(Plan& plan, const model::ModelDesc& model, Nodes& nodes, ValueId kept)
      : plan_(plan), model_(model), nodes_(nodes), kept_(kept) {}

  void layer(int32_t i) {
    const model::LayerSpec& spec = model_.layers[static_cast<size_t>(i)];
    if (has_plain_attention(spec)) {
      first_products(spec.attention, i);
      fuse_attention(plan_, model_, nodes_, i);
    }
    if (spec.beside) experts_down(*spec.beside, i);
    if (spec.ffn.kind != model::FfnKind::moe) return;
    router(spec.ffn, i);
    experts_down(spec.ffn, i);
    shared_experts_first(spec.ffn, i);
    shared_down(spec.ffn, i);
  }

  // Products of streamed weights compute the norm of their rows themselves, up to the first reader that cannot.
  void fold_norms() {
    plan::fold_norms(nodes_, [&](Node& node, const NormOperands& norm) { return norms_rows(node, norm); });
  }

 private:
  ops::Layout layout_of(WeightId w) const { return plan_.weights[static_cast<size_t>(w)].layout; }
  // The fused launches of several products do not support factors.
  bool scaled(WeightId w) const { return model_.weight(w).scale != 1.0; }
  size_t product(Span span, WeightId w) const {
    return find_node<MatmulOperands>(nodes_, span, [&](const MatmulOperands& o) { return o.w.id == w; });
  }

  // The weight whose kernels can compute the norm of the rows that the node reads; empty if there is none.
  std::optional<WeightId> norming_weight(const Node& node) const {
    WeightId w = kNone;
    if (const auto* matmul = operands_of<MatmulOperands>(node)) {
      if (std::get<ops::MatmulDesc>(node.desc).batch == 1) w = matmul->w.id;
    } else if (const auto* up_gate = operands_of<UpGateOperands>(node)) {
      w = up_gate->w_gate.id;
    } else if (const auto* experts = operands_of<MoeUpGateOperands>(node)) {
      w = experts->w_gate.id;
    } else if (const auto* qkv = operands_of<QkvOperands>(node)) {
      w = qkv->w_q.id;
    }
    if (w == kNone || layout_of(w) != ops::Layout::gpu || model_.weight(w).rows > kMostNormedRows) return std::nullopt;
    return w;
  }

  bool norms_rows(Node& node, const NormOperands& norm) const {
    const std::optional<WeightId> weight = norming_weight(node);
    if (norm.out.value == kept_ || !weight || !stand_together(plan_, {*weight, norm.weight.id})) return false;
    norm_inside(node, norm);
    return true;
  }

  // q, k and v in one launch, or the first products of latent attention.
  void first_products(const model::AttentionSpec& a, int32_t i) {
    if (a.kind == model::AttentionKind::mla) {
      two_products(a.q_a != kNone ? a.q_a : a.q, a.kv_a, "_and_kv_a", i);
      return;
    }
    if (a.v_is_k) {
      two_products(a.q, a.k, "k", i);
      return;
    }
    const std::optional<ops::QkvDesc> desc = qkv_desc(plan_, model_, a);
    if (!desc) return;
    ops::QkvDesc normed = *desc;
    normed.norm = true;
    if (fused_takes(plan_.device_of(a.q), normed)) {
      merge_qkv(nodes_, i, a, *desc);
    } else if (const size_t at = product(layer_span(nodes_, i), a.q); two_products(a.q, a.k, "k", i)) {
      // If no kernel reads all three types, q and k may still share one.
      nodes_[at + 1].beside = false;
    }
  }

  bool two_products(WeightId first, WeightId second, const char* suffix, int32_t i) {
    const std::optional<ops::QkvDesc> desc = pair_desc(plan_, model_, first, second);
    if (!desc) return false;
    ops::QkvDesc normed = *desc;
    normed.norm = true;
    if (!fused_takes(plan_.device_of(first), normed)) return false;
    merge_pair(nodes_, i, first, suffix, *desc);
    return true;
  }

  // Norm, router and the choice of experts.
  void router(const model::FfnSpec& f, int32_t i) {
    const size_t at = product(layer_span(nodes_, i), f.router);
    const auto* norm = operands_of<NormOperands>(nodes_[at - 1]);
    const auto* route = operands_of<MoeRouteOperands>(nodes_[at + 1]);
    // The fused launch does not support a factor on an expert's weight.
    if (norm == nullptr || route == nullptr || route->expert_scale.id != kNone) return;
    const model::Weight& weight = model_.weight(f.router);
    const ops::NormRouteDesc desc{.type = plan_.type_of(f.router),
                                  .layout = layout_of(f.router),
                                  .k = weight.cols,
                                  .experts = f.experts,
                                  .used = f.used,
                                  .groups = f.groups,
                                  .groups_used = f.groups_used,
                                  .gating = f.gating,
                                  .normalize = f.normalize};
    if (!stand_together(plan_, {f.router, norm->weight.id}) || !fused_takes(plan_.device_of(f.router), desc)) return;
    replace_nodes(nodes_, {at - 1, at + 2},
                  make_node(str_cat("blk.", i, ".norm_route"), i, desc,
                            {.x = norm->x,
                             .norm = norm->weight,
                             .eps = norm->eps,
                             .w = f.router,
                             .bias = f.router_bias,
                             .selection_bias = route->selection_bias,
                             .scale = route->scale,
                             .moe_index = route->moe_index,
                             .normed = norm->out,
                             .ids = route->ids,
                             .weights = route->weights}));
    experts_read_bytes(f, i, at - 1);
  }

  // Converts the normalised rows to bytes once, if the kernels of the experts' first products multiply by bytes.
  void experts_read_bytes(const model::FfnSpec& f, int32_t i, size_t router) {
    auto* route = operands_of<NormRouteOperands>(nodes_[router]);
    const Span span = layer_span(nodes_, i);
    const size_t at =
        find_node<MoeUpGateOperands>(nodes_, span, [&](const auto& o) { return o.w_gate.id == f.experts_gate; });
    if (at == span.end || at < router || nodes_[at].divided) return;
    auto& experts = *operands_of<MoeUpGateOperands>(nodes_[at]);
    auto desc = std::get<ops::NormRouteDesc>(nodes_[router].desc);
    auto of_experts = std::get<ops::MoeUpGateDesc>(nodes_[at].desc);
    desc.bytes = of_experts.bytes = true;
    if (!same_rows(experts.x, route->normed) || !stand_together(plan_, {f.router, f.experts_gate, f.experts_up}) ||
        !fused_takes(plan_.device_of(f.router), desc) || !fused_takes(plan_.device_of(f.experts_gate), of_experts)) {
      return;
    }
    const auto row = static_cast<size_t>(ops::byte_row_bytes(desc.k));
    const Operand bytes{.value = add_value(plan_, str_cat("blk.", i, ".norm_bytes"), row, 0, ListId::fused),
                        .stride_bytes = static_cast<int64_t>(row)};
    route->bytes = experts.x_bytes = bytes;
    nodes_[router].desc = desc;
    nodes_[at].desc = of_experts;
  }

  size_t down_of_experts(const model::FfnSpec& f, int32_t i) const {
    return find_node<MatmulIdOperands>(nodes_, layer_span(nodes_, i),
                                       [&](const MatmulIdOperands& o) { return o.w.id == f.experts_down; });
  }

  // Down products, weighted sum and residual.
  void experts_down(const model::FfnSpec& f, int32_t i) {
    const ops::MoeDownSumDesc desc{.type = plan_.type_of(f.experts_down),
                                   .layout = layout_of(f.experts_down),
                                   .n = model_.n_embd,
                                   .k = f.width,
                                   .experts = f.experts,
                                   .used = f.used};
    if (!stand_together(plan_, {f.experts_down, f.router}) || !fused_takes(plan_.device_of(f.experts_down), desc)) {
      return;
    }
    const size_t at = down_of_experts(f, i);
    const auto& down = *operands_of<MatmulIdOperands>(nodes_[at]);
    const auto& sum = *operands_of<MoeSumOperands>(nodes_[at + 1]);
    replace_nodes(nodes_, {at, at + 2},
                  make_node(str_cat("blk.", i, ".moe_down_sum"), i, desc,
                            {.x = down.x,
                             .w = down.w,
                             .bias = down.bias,
                             .ids = down.ids,
                             .weights = sum.weights,
                             .residual = sum.residual,
                             .scale = sum.scale,
                             .out = sum.out}));
  }

  // Adds the down product of the shared expert as another slot of the sum over experts, if it is a streaming product.
  // The nodes between them move before the sum.
  void shared_down(const model::FfnSpec& f, int32_t i) {
    const Span span = layer_span(nodes_, i);
    size_t at = find_node<MoeDownSumOperands>(nodes_, span, [&](const auto& o) { return o.w.id == f.experts_down; });
    const size_t own = f.dense_width > 0 ? product(span, f.down) : span.end;
    if (at == span.end || own == span.end || own < at || !alike(plan_, f.down, f.experts_down) || scaled(f.down))
      return;
    auto operands = *operands_of<MoeDownSumOperands>(nodes_[at]);
    const MatmulOperands down = *operands_of<MatmulOperands>(nodes_[own]);
    if (down.bias.id != kNone || !same_rows(down.residual, operands.out) || !same_rows(down.y, operands.out) ||
        down.scale != operands.scale) {
      return;
    }
    for (size_t between = at + 1; between < own; ++between) {
      const ValueId sum = operands.out.value;
      if (reads(nodes_[between], sum) || writes(nodes_[between], sum)) return;
    }
    auto desc = std::get<ops::MoeDownSumDesc>(nodes_[at].desc);
    const DeviceInfo& device = plan_.device_of(f.down);
    const ops::Config alone = ops::default_config(desc, device);
    if (ops::variants(ops::Family::moe_down_sum)[alone.variant].name != "stream") return;
    desc.shared = f.dense_width;
    if (!fused_takes(device, desc)) return;
    operands.shared_x = down.x;
    operands.shared_w = down.w.id;
    const auto place = [&](size_t node) { return nodes_.begin() + static_cast<std::ptrdiff_t>(node); };
    std::rotate(place(at), place(at + 1), place(own));
    at = own - 1;
    replace_nodes(nodes_, {at, at + 2}, make_node(nodes_[at].name, i, desc, operands));
  }

  // If shared experts compute the norm of their rows themselves, they must read the residual stream before the other
  // experts are added to it.
  void shared_experts_first(const model::FfnSpec& f, int32_t i) {
    const Span span = layer_span(nodes_, i);
    const size_t shared_down = f.dense_width > 0 ? product(span, f.down) : span.end;
    if (shared_down == span.end || !stand_together(plan_, {f.experts_down, f.router, f.down})) return;
    size_t down = find_node<MoeDownSumOperands>(nodes_, span, [](const auto&) { return true; });
    size_t shared = down + 1;
    if (down == span.end) {
      down = down_of_experts(f, i);
      shared = down + 2;
    }
    const size_t norm = find_node<NormOperands>(nodes_, span, [&](const NormOperands& o) {
      return o.weight.id == model_.layers[static_cast<size_t>(i)].ffn_norm;
    });
    if (norm == span.end) return;
    const ValueId rows = operands_of<NormOperands>(nodes_[norm])->out.value;
    for (size_t at = norm + 1; at < down; ++at) {
      if (reads(nodes_[at], rows) && !norming_weight(nodes_[at])) return;
    }
    const auto place = [&](size_t at) { return nodes_.begin() + static_cast<std::ptrdiff_t>(at); };
    std::rotate(place(down), place(shared), place(shared_down));
  }

  Plan& plan_;
  const model::ModelDesc& model_;
  Nodes& nodes_;
  ValueId kept_;
};

}  // namespace

NodeList list_from(const model::ModelDesc& model, const NodeList& general, ListId id) {
  return {.id = id,
          .nodes = general.nodes,
          .residual = general.residual,
          .rows_in = general.rows_in,
          .hidden = model.draft_blocks > 0 ? general.hidden : kNoValue};
}

NodeList fuse(Plan& plan, const model::ModelDesc& model, const NodeList& general) {
  NodeList list = list_from(model, general, ListId::fused);
  Fuse pass(plan, model, list.nodes, list.hidden);
  for (size_t i = 0; i < model.layers.size(); ++i) pass.layer(static_cast<int32_t>(i));
  pass.fold_norms();
  return list;
}

}  // namespace dyno::plan
