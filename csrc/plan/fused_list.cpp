#include "plan/fused_list.h"

#include "core/error.h"

namespace dyno::plan {

using model::kNone;
using model::WeightId;

namespace {
// A norm inside of a product is computed by every block. For the many blocks of an output matrix a launch is cheaper.
constexpr int64_t kMostNormedRows = 32768;
}  // namespace

bool FusedList::takes(const ops::OpDesc& desc) const {
  for (const int64_t tokens : {int64_t{1}, kFusedTokens}) {
    const ops::OpDesc d = ops::with_tokens(desc, tokens);
    if (!ops::supports(d, ops::default_config(d, plan_.device), plan_.device)) return false;
  }
  return true;
}

OpList::Source FusedList::source(Input& input, WeightId w, int32_t layer) {
  const model::Weight& weight = model_.weight(w);
  const bool streamed = plan_.weights[static_cast<size_t>(w)].layout == ops::Layout::gpu;
  if (input.before && !input.f32 && streamed && weight.rows <= kMostNormedRows) return {input.before, true};
  return OpList::source(input, w, layer);
}

// ---- attention part ------------------------------------------------------------------------------------------------

OpList::Qkv FusedList::qkv_products(const model::AttentionSpec& a, Input& h, int32_t i) {
  if (a.qkv != kNone) return OpList::qkv_products(a, h, i);
  const auto layout_of = [&](WeightId w) { return plan_.weights[static_cast<size_t>(w)].layout; };
  const ops::Layout layout = layout_of(a.q);
  if (layout_of(a.k) != layout || layout_of(a.v) != layout) return OpList::qkv_products(a, h, i);
  ops::QkvDesc desc{.type = model_.weight(a.q).type,
                    .type_k = model_.weight(a.k).type,
                    .type_v = model_.weight(a.v).type,
                    .layout = layout,
                    .n = model_.weight(a.q).rows,
                    .n_k = model_.weight(a.k).rows,
                    .n_v = model_.weight(a.v).rows,
                    .k = model_.n_embd,
                    .norm = true};
  // Where no kernel reads all three types, q and k may still have one in common.
  bool with_v = true;
  if (!takes(desc)) {
    with_v = false;
    desc.n_v = 0;
    desc.type_v = desc.type;
    if (!takes(desc)) return OpList::qkv_products(a, h, i);
  }
  const std::string p = str_cat("blk.", i, ".");
  const Qkv out{value(p + "q", desc.n), value(p + "k", desc.n_k), value(p + "v", model_.weight(a.v).rows)};
  const Source input = source(h, a.q, i);
  desc.norm = input.norm;
  Node& node = emit(p + (with_v ? "attn_qkv" : "attn_qk"), desc, i);
  set_norm(node, input, h);
  node.x = input.x;
  node.y = out.q;
  node.y2 = out.k;
  node.w = a.q;
  node.w2 = a.k;
  node.bias = a.q_bias;
  node.bias2 = a.k_bias;
  if (with_v) {
    node.y3 = out.v;
    node.w3 = a.v;
    node.bias3 = a.v_bias;
  } else {
    matmul(p + "attn_v", h, a.v, a.v_bias, out.v, {}, 1.0f, i);
  }
  return out;
}

void FusedList::two_products(Input& x, const Product& first, const Product& second, int32_t i) {
  const model::Weight& a = model_.weight(first.w);
  const model::Weight& b = model_.weight(second.w);
  ops::QkvDesc desc{.type = a.type,
                    .type_k = b.type,
                    .type_v = a.type,
                    .layout = plan_.weights[static_cast<size_t>(first.w)].layout,
                    .n = a.rows,
                    .n_k = b.rows,
                    .k = a.cols,
                    .norm = true};
  if (plan_.weights[static_cast<size_t>(second.w)].layout != desc.layout || !takes(desc)) {
    return OpList::two_products(x, first, second, i);
  }
  const Source input = source(x, first.w, i);
  desc.norm = input.norm;
  Node& node = emit(first.name + "_and_kv_a", desc, i);
  set_norm(node, input, x);
  node.x = input.x;
  node.y = first.y;
  node.y2 = second.y;
  node.w = first.w;
  node.w2 = second.w;
}

// ---- experts part --------------------------------------------------------------------------------------------------

void FusedList::experts_down(const model::FfnSpec& f, Operand hidden, const Routing& routing, int32_t i) {
  const ops::MoeDownSumDesc desc{.type = model_.weight(f.experts_down).type,
                                 .layout = plan_.weights[static_cast<size_t>(f.experts_down)].layout,
                                 .n = model_.n_embd,
                                 .k = f.width,
                                 .experts = f.experts,
                                 .used = f.used};
  if (!takes(desc)) return OpList::experts_down(f, hidden, routing, i);
  Node& node = emit(str_cat("blk.", i, ".moe_down_sum"), desc, i);
  node.x = hidden;
  node.w = f.experts_down;
  node.bias = f.experts_down_bias;
  node.ids = routing.ids;
  node.route_weights = routing.weights;
  node.residual = residual_;
  node.y = residual_;
  node.scale = static_cast<float>(model_.residual_scale);
}

}  // namespace dyno::plan
