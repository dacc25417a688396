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
