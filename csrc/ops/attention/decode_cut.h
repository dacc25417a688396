// Division of the work of the CPU variant decode. A tile has up to kDecodeRows rows of one run and KV head. Its keys
// are divided into parts. An item is one part for the tiles of some adjacent heads. These functions compute numbers
// only.
#pragma once

#include "ops/attention/kernels.h"
#include "ops/op.h"

namespace dyno::ops {

// Maximum of adjacent KV heads in an item: a divisor of their number, up to 8.
int64_t most_decode_heads(int64_t kv_heads);

// Default maximum of parts of the keys.
int64_t decode_splits(const AttentionDesc& desc, int cores);

// A thread's share of scratch: a private part, followed by partial results of any thread.
struct DecodeLayout {
  int64_t private_floats;
  int64_t row_floats;   // one row's partial result
  int64_t part_floats;  // the results of a tile for one part of the keys
  int64_t tile_floats;  // for all parts
  int64_t tiles_per_share;

  DecodeLayout(const AttentionDesc& desc, int64_t splits);
};

// The keys of a tile in up to `splits` parts, the longest first; lengths differ by at most one block.
struct KeyParts {
  int64_t begin, end, count;

  KeyParts(int64_t begin, int64_t end, int64_t kv_heads, int64_t splits);
  // The first key of a part; it is also the end of the previous part.
  int64_t first(int64_t part) const;
};

// The tiles of a launch are processed in rounds; the scratch shares of all threads limit the tiles in a round.
struct DecodeCut {
  int64_t heads = 1;         // in one item
  int64_t round_groups = 1;  // groups of tiles (of `heads` heads) in a round
};

// The division with the shortest critical path over all rounds. `parts`: of all tiles of one KV head.
DecodeCut cut_decode(int64_t kv_heads, int64_t tiles, int64_t parts, int64_t tiles_per_share, int threads);

}  // namespace dyno::ops
