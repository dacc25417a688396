// The fields of family sample, by name: of its key, a node's operands and a launch's arguments.
#pragma once

#include "ops/arguments.h"
#include "ops/sample/sample.h"

namespace dyno::ops {

// clang-format off
template <typename V>
constexpr void for_each_field(std::type_identity<SampleDesc>, V&& v) {
  using D = SampleDesc;
  v("m", &D::m, In::never); v("n_vocab", &D::n_vocab, In::always);
}
// clang-format on

struct SampleOperands {
  Reads logits;
};
DYNO_FIELDS(SampleOperands, logits)

// Names and sizes of a single launch's arguments.
template <typename Visitor>
void arguments(const SampleDesc& d, SampleArgs& a, Visitor& v) {
  v.in("logits", a.logits, d.m * d.n_vocab);
  v.constants("uniform", a.uniform, d.m, 0.5f);
  v.number("temperature", a.temperature, 1.0f, 0.8f);
  v.number("top_k", a.top_k, 0, 40);
  v.number("top_p", a.top_p, 1.0f, 0.95f);
  v.number("min_p", a.min_p, 0.0f);
  v.number("finite_only", a.finite_only, false);
  v.out("out", a.out, d.m);
}

}  // namespace dyno::ops
