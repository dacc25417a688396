// How the decode variant of attention on the CPU cuts its work. A tile is up to kDecodeRows rows of one run and KV
// head. Its keys are cut into parts, and an item is one part for the tiles of some heads of a position together.
// Numbers alone: nothing here depends on what is computed.
#pragma once

#include "ops/attention/kernels.h"
#include "ops/op.h"

namespace dyno::ops {

// KV heads of a position that an item takes together at most: a divisor of all of them, up to 8.
int64_t most_decode_heads(int64_t kv_heads);

// Parts of the keys, at most, by default.
int64_t decode_splits(const AttentionDesc& desc, int cores);

// A thread's share of scratch: a private part, and behind it partial results, of whichever thread.
struct DecodeLayout {
  int64_t private_floats;
  int64_t row_floats;   // one row's partial result
  int64_t part_floats;  // a tile's results of one part of the keys
  int64_t tile_floats;  // of all parts
  int64_t tiles_per_share;

  DecodeLayout(const AttentionDesc& desc, int64_t splits);
};

// The keys of a tile in up to `splits` parts, the longest first; no two differ by more than a block.
struct KeyParts {
  int64_t begin, end, count;

  KeyParts(int64_t begin, int64_t end, int64_t kv_heads, int64_t splits);
  // Where a part begins; the next one begins where it ends.
  int64_t first(int64_t part) const;
};

// The tiles of a launch go through rounds, as many in each as the shares of all threads have room for.
struct DecodeCut {
  int64_t heads = 1;         // that an item takes together
  int64_t round_groups = 1;  // groups of tiles of so many heads that a round has
};

// The cut with the shortest way of a thread through all rounds. `parts`: of all tiles of one KV head.
DecodeCut cut_decode(int64_t kv_heads, int64_t tiles, int64_t parts, int64_t tiles_per_share, int threads);

}  // namespace dyno::ops
