// The arguments of single launches. Each family declares their names, sizes and values for timing once. Bindings use
// this declaration to read arguments from Python and to generate them for timing.
//
// arguments(desc, args, visitor) of a family calls one of these for each member of its Args:
//   number(name, member, value[, timed])   given or `value`; `timed` where a launch is only timed
//   in, out(name, pointer, count)          arrays; out: written or changed
//   optional(name, pointer, count, wanted) may be absent; `wanted`: not where a launch is only timed
//   optional_out(name, pointer, count)     an out that may be absent, as where a launch is only timed
//   constants(name, pointer, count, value), integers(name, pointer, count, limit), routing(name, ids, m, used, experts)
//                                          arrays whose timed values are not drawn from [-1, 1)
//   bytes, bytes_out(name, pointer, count) weights and rows of other types; rows(name, x, act, count): activations
//   runs(m, args)                          the sequences, and slot_positions
//   state(name, pointer, count)            what each of those sequences keeps; read and changed
//   cache(name, pointer, row_name, row_bytes, type, elements[, offset])   of those sequences
//   latents(name, pointer, type, rows, row_bytes, elements)
//   require(there, name)                   throws for an argument that this desc needs
#pragma once

#include "core/fields.h"
#include "ops/args.h"
#include "ops/copy/act_q8.h"
#include "ops/matmul/layout.h"
#include "ops/op.h"
#include "ops/operand.h"

namespace dyno::ops {

// Whether an op key shows a field of its Desc, see fields.h.
enum class In : uint8_t { always, if_set, never };

// Elements from the first row's start to the last row's end; 0 if there are no rows.
inline int64_t extent(int64_t rows, int64_t stride, int64_t row) { return rows == 0 ? 0 : (rows - 1) * stride + row; }

inline int64_t act_row_bytes(ActType act, int64_t k) {
  return act == ActType::q8 ? static_cast<int64_t>(act_q8_row_bytes(k)) : k * 4;
}

inline int64_t matrix_bytes(const auto& d) { return static_cast<int64_t>(layout_bytes(d.type, d.layout, d.n, d.k)); }

// For a product that normalises its input rows.
template <typename Visitor>
void norm_arguments(int64_t k, NormInside& norm, Visitor& v) {
  v.optional("norm_weight", norm.weight, k, true);
  v.number("norm_eps", norm.eps, 0.0f, 1e-6f);
}

}  // namespace dyno::ops
