// The fields of family copy, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/copy/copy.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<CopyDesc>, V&& v) {
  using D = CopyDesc;
  v("m", &D::m, In::never); v("k", &D::k, In::always); v("act", &D::act, In::always);
}
// clang-format on

struct CopyOperands {
  Reads x;
  Writes out;
};
DYNO_FIELDS(CopyOperands, x, out)

DYNO_FIELDS(CopyArgs, x, x_stride, out, out_stride_bytes)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const CopyDesc& d, CopyArgs& a, Visitor& v) {
  v.number("x_stride", a.x_stride, d.k);
  v.in("x", a.x, extent(d.m, a.x_stride, d.k));
  v.number("out_stride_bytes", a.out_stride_bytes, act_row_bytes(d.act, d.k));
  v.bytes_out("out", a.out, extent(d.m, a.out_stride_bytes, act_row_bytes(d.act, d.k)));
}

}  // namespace dyno::ops
