#include "ops/attention/decode_cut.h"

#include <algorithm>

namespace dyno::ops {
namespace {

constexpr int64_t kMostHeads = 8;
constexpr int64_t kMostSplits = 16;
// Floats of partial results in a share.
constexpr int64_t kPartialFloats = int64_t{1} << 18;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

}  // namespace

int64_t most_decode_heads(int64_t kv_heads) {
  int64_t most = 1;
  for (int64_t heads = 2; heads <= std::min(kv_heads, kMostHeads); ++heads) {
    if (kv_heads % heads == 0) most = heads;
  }
  return most;
}

// Enough for items of adjacent heads, which are read faster than separate heads.
int64_t decode_splits(const AttentionDesc& desc, int cores) {
  const int64_t group = desc.heads / std::max<int64_t>(1, desc.kv_heads);
  const int64_t tiles = desc.kv_heads * ceil_div(desc.m * group, kDecodeRows);
  const int64_t items = tiles / most_decode_heads(desc.kv_heads);
  int64_t splits = 1;
  while (splits < kMostSplits && items * splits < 2 * cores) splits *= 2;
  return splits;
}

DecodeLayout::DecodeLayout(const AttentionDesc& desc, int64_t splits) {
  const int64_t heads = most_decode_heads(desc.kv_heads);
  private_floats = heads * kDecodeRows * (round_up(desc.dk, 16) + kDecodeKeys) + round_up(desc.dv, 16);
  row_floats = kPartialHead + round_up(desc.dv, 16);
  part_floats = kDecodeRows * row_floats;
  tile_floats = splits * part_floats;
  const int64_t group = desc.heads / desc.kv_heads;
  const int64_t most_tiles = desc.kv_heads * std::min(desc.m * ceil_div(group, kDecodeRows), desc.m * group);
  tiles_per_share = std::clamp<int64_t>(kPartialFloats / tile_floats, 1, std::max<int64_t>(most_tiles, 1));
}

// The thread that adds the parts reads lines that other threads wrote. So a part has four blocks, unless there are so
// many splits per head that threads would otherwise have no part.
KeyParts::KeyParts(int64_t begin, int64_t end, int64_t kv_heads, int64_t splits) : begin(begin), end(end) {
  const int64_t least_blocks = std::clamp<int64_t>(2 * kv_heads / splits, 1, 4);
  count = std::clamp<int64_t>(ceil_div(end - begin, kDecodeKeys) / least_blocks, 1, splits);
}

int64_t KeyParts::first(int64_t part) const {
  const int64_t blocks = ceil_div(end - begin, kDecodeKeys);
  return std::min(end, begin + ceil_div(blocks * part, count) * kDecodeKeys);
}

DecodeCut cut_decode(int64_t kv_heads, int64_t tiles, int64_t parts, int64_t tiles_per_share, int threads) {
  DecodeCut best;
  int64_t shortest = INT64_MAX;
  for (int64_t heads = 1; heads <= std::min(most_decode_heads(kv_heads), tiles_per_share); ++heads) {
    if (kv_heads % heads != 0) continue;
    const int64_t groups = tiles / heads, round = threads * (tiles_per_share / heads);
    const auto items_in_a_row = [&](int64_t groups_of_round) {
      return ceil_div(groups_of_round * parts * kv_heads, tiles * threads);
    };
    // A position of the keys has a fixed cost of about half a head, in addition to its heads: eight adjacent heads are
    // one stream, and were 1.4 times as fast as one or two.
    const int64_t way = (groups / round * items_in_a_row(round) + items_in_a_row(groups % round)) * (2 * heads + 1);
    if (way <= shortest) best = {.heads = heads, .round_groups = round};
    shortest = std::min(shortest, way);
  }
  return best;
}

}  // namespace dyno::ops
