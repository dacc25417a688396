// Kernels of moe_route, one set per instruction set.
#pragma once

#include "ops/args.h"
#include "ops/isa.h"

namespace dyno::ops {
struct MoeRouteShape {
  int64_t experts, used, groups, groups_used;
  int gating;  // the value of ops::Gating
  bool normalize;
};
}  // namespace dyno::ops

// clang-format off
DYNO_DECLARE_KERNELS(
    // Tokens [begin, end); `scratch` has 2 * experts + groups floats.
    void moe_route_tokens(const MoeRouteArgs& args, const MoeRouteShape& shape, int64_t begin, int64_t end,
                          float* scratch);
)
// clang-format on
