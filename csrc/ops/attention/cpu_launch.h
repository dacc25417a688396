// The CPU variants of attention: their scratch memory, and the division of their work into tasks.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/op.h"

namespace dyno::ops {

// Scratch floats per thread of variant blocked, for any instruction set; blocked.cpp pads rows to whole panels.
int64_t blocked_floats(int64_t q_tile, int64_t k_block, int64_t dk, int64_t dv);

// Parts of the keys of a sequence with few rows in variant blocked. One, so that the answer to a sequence does not
// depend on the others in its batch.
inline constexpr int64_t kFewRowsSplits = 1;

// The parameters have the names in variants.def. An op key does not distinguish a prompt from a step of many sequences.
// In a tile of blocked, the rows of one token would occupy whole vectors, and keys would be converted for them alone.
// So launch_blocked() computes sequences with at most kDecodeRows rows as launch_decode() does.
void launch_blocked(int64_t q_tile, int64_t k_block, const AttentionDesc& desc, const AttentionArgs& args,
                    CpuContext& context);
// Scratch bytes per thread of variant gather, and its launch.
size_t gather_bytes(int64_t rows, const AttentionDesc& desc);
void launch_gather(int64_t rows, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context);
void launch_decode(int64_t splits, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context);

}  // namespace dyno::ops
