// The fields of family matmul, by name: of its key, of a node's operands and of a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/half_tiles.h"
#include "ops/matmul/matmul.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<MatmulDesc>, V&& v) {
  using D = MatmulDesc;
  v("type", &D::type, In::always); v("m", &D::m, In::never); v("n", &D::n, In::always); v("k", &D::k, In::always);
  v("batch", &D::batch, In::if_set); v("norm", &D::norm, In::if_set); v("layout", &D::layout, In::if_set); v("act", &D::act, In::if_set);
  v("exact", &D::exact, In::if_set);
  v("x_tiles", &D::x_tiles, In::never); v("path", &D::path, In::never); v("compute", &D::compute, In::never);
}
// clang-format on

struct MatmulOperands {
  Reads x;
  NormOfRows norm{};
  NeedsWeight w;
  MayUseWeight bias{};
  MayRead residual{};
  float scale = 1.0f;
  Writes y;
  float softcap = 0.0f;  // of y, applied after the product; 0: none
};
DYNO_FIELDS(MatmulOperands, x, norm, w, bias, residual, scale, y, softcap)

DYNO_FIELDS(MatmulArgs, x, x_stride_bytes, x_batch_stride_bytes, w, w_batch_stride_bytes, bias, residual, scale, y,
            y_stride, y_batch_stride, norm)
// Operands without an argument of the same name.
constexpr FieldNames only_plan(std::type_identity<MatmulOperands>) { return {"softcap"}; }

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const MatmulDesc& d, MatmulArgs& a, Visitor& v) {
  const int64_t x_row = act_row_bytes(d.act, d.k);
  v.number("x_batch_stride_bytes", a.x_batch_stride_bytes, x_row);
  v.number("x_stride_bytes", a.x_stride_bytes, x_row * d.batch);
  if (d.x_tiles > 0) {
    v.bytes("x_tiles", a.x, half_tiles(d.m, d.k, d.x_tiles).bytes());
  } else {
    v.rows("x", a.x, d.act, extent(d.m, a.x_stride_bytes, extent(d.batch, a.x_batch_stride_bytes, x_row)));
  }
  v.number("w_batch_stride_bytes", a.w_batch_stride_bytes, matrix_bytes(d));
  v.bytes("w", a.w, extent(d.batch, a.w_batch_stride_bytes, matrix_bytes(d)));
  v.optional("bias", a.bias, d.n, false);
  v.number("y_batch_stride", a.y_batch_stride, d.n);
  v.number("y_stride", a.y_stride, d.n * d.batch);
  const int64_t y = extent(d.m, a.y_stride, extent(d.batch, a.y_batch_stride, d.n));
  v.optional("residual", a.residual, y, false);
  if (d.norm) norm_arguments(d.k, a.norm, v);
  v.number("scale", a.scale, 1.0f);
  v.out("y", a.y, y);
}

}  // namespace dyno::ops
