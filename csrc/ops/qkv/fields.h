// The fields of family qkv, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/matmul/layout.h"
#include "ops/qkv/qkv.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<QkvDesc>, V&& v) {
  using D = QkvDesc;
  v("type", &D::type, In::always); v("type_k", &D::type_k, In::always); v("type_v", &D::type_v, In::always);
  v("m", &D::m, In::never); v("n", &D::n, In::always); v("n_k", &D::n_k, In::always); v("n_v", &D::n_v, In::if_set);
  v("k", &D::k, In::always); v("norm", &D::norm, In::if_set); v("layout", &D::layout, In::if_set);
}
// clang-format on

struct QkvOperands {
  Reads x;
  NormOfRows norm{};
  NeedsWeight w_q, w_k;
  MayUseWeight w_v{};
  MayUseWeight bias_q{}, bias_k{}, bias_v{};
  Writes q, k;
  MayWrite v{};
};
DYNO_FIELDS(QkvOperands, x, norm, w_q, w_k, w_v, bias_q, bias_k, bias_v, q, k, v)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const QkvDesc& d, QkvArgs& a, Visitor& v) {
  constexpr const char* kW[] = {"w_q", "w_k", "w_v"};
  constexpr const char* kBias[] = {"bias_q", "bias_k", "bias_v"};
  constexpr const char* kY[] = {"q", "k", "v"};
  constexpr const char* kStride[] = {"q_stride", "k_stride", "v_stride"};
  const DType types[] = {d.type, d.type_k, d.type_v};
  const int64_t heights[] = {d.n, d.n_k, d.n_v};
  const int64_t row = act_row_bytes(ActType::f32, d.k);
  v.number("x_stride_bytes", a.x_stride_bytes, row);
  v.in("x", a.x, (extent(d.m, a.x_stride_bytes, row) + 3) / 4);
  for (size_t i = 0; i < 3 && heights[i] > 0; ++i) {
    v.bytes(kW[i], a.w[i], static_cast<int64_t>(layout_bytes(types[i], d.layout, heights[i], d.k)));
    v.optional(kBias[i], a.bias[i], heights[i], false);
    v.number(kStride[i], a.y_stride[i], heights[i]);
    v.out(kY[i], a.y[i], extent(d.m, a.y_stride[i], heights[i]));
  }
  if (d.norm) norm_arguments(d.k, a.norm, v);
}

}  // namespace dyno::ops
