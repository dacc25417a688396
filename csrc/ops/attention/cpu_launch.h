// The variants of attention on the CPU: what they need of scratch memory, and how their work is cut into tasks.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/op.h"

namespace dyno::ops {

// Floats of a thread of variant blocked, over all instruction sets: blocked.cpp pads rows to whole panels.
int64_t blocked_floats(int64_t q_tile, int64_t k_block, int64_t dk, int64_t dv);

// Parameters as variants.def names them.
void launch_blocked(int64_t q_tile, int64_t k_block, const AttentionDesc& desc, const AttentionArgs& args,
                    CpuContext& context);
void launch_decode(int64_t splits, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context);

}  // namespace dyno::ops
