// The fields of family sigmoid_gate, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/sigmoid_gate/sigmoid_gate.h"

namespace dyno::ops {

template <typename V>
constexpr void for_each_field(std::type_identity<SigmoidGateDesc>, V&& v) {
  v("m", &SigmoidGateDesc::m, In::never);
  v("n", &SigmoidGateDesc::n, In::always);
  v("gates", &SigmoidGateDesc::gates, In::always);
}

struct SigmoidGateOperands {
  Reads x, gate;
  Writes y;
};
DYNO_FIELDS(SigmoidGateOperands, x, gate, y)
DYNO_FIELDS(SigmoidGateArgs, x, x_stride, gate, gate_stride, y, y_stride)

template <typename Visitor>
void arguments(const SigmoidGateDesc& d, SigmoidGateArgs& a, Visitor& v) {
  v.number("x_stride", a.x_stride, d.n);
  v.number("gate_stride", a.gate_stride, d.gates);
  v.number("y_stride", a.y_stride, d.n);
  v.in("x", a.x, extent(d.m, a.x_stride, d.n));
  v.in("gate", a.gate, extent(d.m, a.gate_stride, d.gates));
  v.out("y", a.y, extent(d.m, a.y_stride, d.n));
}

}  // namespace dyno::ops
