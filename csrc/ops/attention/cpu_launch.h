// The variants of attention on the CPU: what they need of scratch memory, and how their work is cut into tasks.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/op.h"

namespace dyno::ops {

// Floats of a thread of variant blocked, over all instruction sets: blocked.cpp pads rows to whole panels.
int64_t blocked_floats(int64_t q_tile, int64_t k_block, int64_t dk, int64_t dv);

// KV heads of a position that a decode task takes together at most: a divisor of all of them, up to 8.
int64_t most_decode_heads(int64_t kv_heads);

// Numbers of the decode variant's layout: a tile is up to kDecodeRows rows of one run and kv head.
struct DecodeLayout {
  int64_t private_floats;  // of each thread
  int64_t row_floats;      // one row's partial result
  int64_t part_floats;     // a tile's results of one part of the keys
  int64_t tile_floats;     // of all parts
  int64_t tiles_per_round;

  DecodeLayout(const AttentionDesc& desc, int64_t splits);
};

// Parameters as variants.def names them.
void launch_blocked(int64_t q_tile, int64_t k_block, const AttentionDesc& desc, const AttentionArgs& args,
                    CpuContext& context);
void launch_decode(int64_t splits, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context);

}  // namespace dyno::ops
