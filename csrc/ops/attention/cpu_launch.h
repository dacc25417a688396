// The CPU variants of attention: their scratch memory, and the division of their work into tasks.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/op.h"

namespace dyno::ops {

// Scratch floats per thread of variant blocked, for any instruction set; blocked.cpp pads rows to whole panels.
int64_t blocked_floats(int64_t q_tile, int64_t k_block, int64_t dk, int64_t dv);

// The parameters have the names in variants.def.
void launch_blocked(int64_t q_tile, int64_t k_block, const AttentionDesc& desc, const AttentionArgs& args,
                    CpuContext& context);
void launch_decode(int64_t splits, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context);

}  // namespace dyno::ops
