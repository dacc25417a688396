// Reads the arguments of the matrix product families from a dict, see ops_run.cpp. Weights and q8 activations are
// arrays of bytes; extents are those of the desc's layout.
#pragma once

#include "bindings/op_args.h"
#include "ops/args.h"
#include "ops/copy/act_q8.h"
#include "ops/matmul/layout.h"
#include "ops/registry.h"

namespace dyno {

inline int64_t act_row_bytes(ops::ActType act, int64_t k) {
  return act == ops::ActType::q8 ? static_cast<int64_t>(ops::act_q8_row_bytes(k)) : k * 4;
}

// The activations: float32 for f32, bytes for q8.
inline const void* read_x(OpArgs& in, ops::ActType act, int64_t bytes) {
  if (act == ops::ActType::f32) return in.in<float>("x", (bytes + 3) / 4);
  return in.in<uint8_t>("x", bytes);
}

inline int64_t matrix_bytes(const auto& d) {
  return static_cast<int64_t>(ops::layout_bytes(d.type, d.layout, d.n, d.k));
}

// Zero rows reach nowhere.
inline int64_t reach(int64_t rows, int64_t stride, int64_t row) { return rows == 0 ? 0 : (rows - 1) * stride + row; }

// Of a product that norms its rows.
inline ops::NormInside read_norm(OpArgs& in, int64_t k) {
  return {.weight = in.optional_in<float>("norm_weight", k), .eps = in.number<float>("norm_eps", 0.0f)};
}

inline ops::MatmulArgs read_matmul_args(OpArgs& in, const ops::MatmulDesc& d) {
  ops::MatmulArgs a;
  const int64_t x_row = act_row_bytes(d.act, d.k);
  a.x_batch_stride_bytes = in.number<int64_t>("x_batch_stride_bytes", x_row);
  a.x_stride_bytes = in.number<int64_t>("x_stride_bytes", x_row * d.batch);
  a.x = read_x(in, d.act, reach(d.m, a.x_stride_bytes, reach(d.batch, a.x_batch_stride_bytes, x_row)));
  a.w_batch_stride_bytes = in.number<int64_t>("w_batch_stride_bytes", matrix_bytes(d));
  a.w = in.in<uint8_t>("w", reach(d.batch, a.w_batch_stride_bytes, matrix_bytes(d)));
  a.bias = in.optional_in<float>("bias", d.n);
  a.y_batch_stride = in.number<int64_t>("y_batch_stride", d.n);
  a.y_stride = in.number<int64_t>("y_stride", d.n * d.batch);
  const int64_t y = reach(d.m, a.y_stride, reach(d.batch, a.y_batch_stride, d.n));
  a.residual = in.optional_in<float>("residual", y);
  if (d.norm) a.norm = read_norm(in, d.k);
  a.scale = in.number<float>("scale", 1.0f);
  a.y = in.out<float>("y", y);
  return a;
}

inline ops::MatmulIdArgs read_matmul_args(OpArgs& in, const ops::MatmulIdDesc& d) {
  ops::MatmulIdArgs a;
  const int64_t x_row = act_row_bytes(d.act, d.k);
  a.x_stride_bytes = in.number<int64_t>("x_stride_bytes", x_row);
  a.x = read_x(in, d.act, reach(d.x_per_slot ? d.m * d.used : d.m, a.x_stride_bytes, x_row));
  a.w_expert_stride_bytes = in.number<int64_t>("w_expert_stride_bytes", matrix_bytes(d));
  a.w = in.in<uint8_t>("w", reach(d.experts, a.w_expert_stride_bytes, matrix_bytes(d)));
  a.bias = in.optional_in<float>("bias", d.experts * d.n);
  a.ids = in.in<int32_t>("ids", d.m * d.used);
  a.y = in.out<float>("y", d.m * d.used * d.n);
  a.workspace = in.out<int32_t>("workspace", ops::moe_workspace_ints(d.m, d.used, d.experts));
  return a;
}

inline ops::UpGateArgs read_matmul_args(OpArgs& in, const ops::UpGateDesc& d) {
  ops::UpGateArgs a;
  const int64_t x_row = act_row_bytes(d.act, d.k);
  a.x_stride_bytes = in.number<int64_t>("x_stride_bytes", x_row);
  a.x = read_x(in, d.act, reach(d.m, a.x_stride_bytes, x_row));
  a.w_gate = in.in<uint8_t>("w_gate", matrix_bytes(d));
  a.w_up = in.in<uint8_t>("w_up", matrix_bytes(d));
  a.bias_gate = in.optional_in<float>("bias_gate", d.n);
  a.bias_up = in.optional_in<float>("bias_up", d.n);
  a.y_stride = in.number<int64_t>("y_stride", d.n);
  a.y = in.out<float>("y", reach(d.m, a.y_stride, d.n));
  if (d.norm) a.norm = read_norm(in, d.k);
  return a;
}

inline ops::MoeUpGateArgs read_matmul_args(OpArgs& in, const ops::MoeUpGateDesc& d) {
  ops::MoeUpGateArgs a;
  const int64_t x_row = act_row_bytes(d.act, d.k);
  a.x_stride_bytes = in.number<int64_t>("x_stride_bytes", x_row);
  a.x = read_x(in, d.act, reach(d.m, a.x_stride_bytes, x_row));
  a.w_expert_stride_bytes = in.number<int64_t>("w_expert_stride_bytes", matrix_bytes(d));
  const int64_t w = reach(d.experts, a.w_expert_stride_bytes, matrix_bytes(d));
  a.w_gate = in.in<uint8_t>("w_gate", w);
  a.w_up = in.in<uint8_t>("w_up", w);
  a.bias_gate = in.optional_in<float>("bias_gate", d.experts * d.n);
  a.bias_up = in.optional_in<float>("bias_up", d.experts * d.n);
  a.ids = in.in<int32_t>("ids", d.m * d.used);
  a.y = in.out<float>("y", d.m * d.used * d.n);
  a.workspace = in.out<int32_t>("workspace", ops::moe_workspace_ints(d.m, d.used, d.experts));
  if (d.norm) a.norm = read_norm(in, d.k);
  return a;
}

inline ops::QkvArgs read_matmul_args(OpArgs& in, const ops::QkvDesc& d) {
  constexpr const char* kW[] = {"w_q", "w_k", "w_v"};
  constexpr const char* kBias[] = {"bias_q", "bias_k", "bias_v"};
  constexpr const char* kY[] = {"q", "k", "v"};
  constexpr const char* kStride[] = {"q_stride", "k_stride", "v_stride"};
  const DType types[] = {d.type, d.type_k, d.type_v};
  const int64_t heights[] = {d.n, d.n_k, d.n_v};
  ops::QkvArgs a;
  a.x_stride_bytes = in.number<int64_t>("x_stride_bytes", d.k * 4);
  a.x = in.in<float>("x", (reach(d.m, a.x_stride_bytes, d.k * 4) + 3) / 4);
  for (size_t i = 0; i < 3 && heights[i] > 0; ++i) {
    a.w[i] = in.in<uint8_t>(kW[i], static_cast<int64_t>(ops::layout_bytes(types[i], d.layout, heights[i], d.k)));
    a.bias[i] = in.optional_in<float>(kBias[i], heights[i]);
    a.y_stride[i] = in.number<int64_t>(kStride[i], heights[i]);
    a.y[i] = in.out<float>(kY[i], reach(d.m, a.y_stride[i], heights[i]));
  }
  if (d.norm) a.norm = read_norm(in, d.k);
  return a;
}

inline ops::MoeDownSumArgs read_matmul_args(OpArgs& in, const ops::MoeDownSumDesc& d) {
  ops::MoeDownSumArgs a;
  a.x = in.in<float>("x", d.m * d.used * d.k);
  a.w_expert_stride_bytes = in.number<int64_t>("w_expert_stride_bytes", matrix_bytes(d));
  a.w = in.in<uint8_t>("w", reach(d.experts, a.w_expert_stride_bytes, matrix_bytes(d)));
  a.bias = in.optional_in<float>("bias", d.experts * d.n);
  a.ids = in.in<int32_t>("ids", d.m * d.used);
  a.weights = in.in<float>("weights", d.m * d.used);
  a.residual = in.optional_in<float>("residual", d.m * d.n);
  a.scale = in.number<float>("scale", 1.0f);
  a.settled = in.number<int32_t>("settled", 0) != 0;
  a.out = in.out<float>("out", d.m * d.n);
  return a;
}

inline ops::CopyArgs read_matmul_args(OpArgs& in, const ops::CopyDesc& d) {
  ops::CopyArgs a;
  const int64_t row = act_row_bytes(d.act, d.k);
  a.x_stride = in.number<int64_t>("x_stride", d.k);
  a.x = in.in<float>("x", reach(d.m, a.x_stride, d.k));
  a.out_stride_bytes = in.number<int64_t>("out_stride_bytes", row);
  a.out = in.out<uint8_t>("out", reach(d.m, a.out_stride_bytes, row));
  return a;
}

}  // namespace dyno
