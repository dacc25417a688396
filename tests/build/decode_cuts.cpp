// How batched decode on the CPU cuts attention into rounds and items; prints the cuts that leave threads idle and
// returns 1 if there are any.
#include <algorithm>
#include <cstdio>

#include "ops/attention/decode_cut.h"

namespace {

using namespace dyno::ops;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Heads {
  int64_t heads, kv_heads, width;
};

// `texts` of one token each, every one `depth` deep.
bool no_thread_waits(const Heads& of, int64_t texts, int64_t depth, int threads) {
  const AttentionDesc desc{.m = texts, .heads = of.heads, .kv_heads = of.kv_heads, .dk = of.width, .dv = of.width};
  const int64_t splits = decode_splits(desc, threads);
  const DecodeLayout layout(desc, splits);
  const KeyParts keys(0, depth, of.kv_heads, splits);
  const int64_t tiles_of_head = texts * ceil_div(of.heads / of.kv_heads, kDecodeRows);
  const int64_t tiles = of.kv_heads * tiles_of_head;
  const DecodeCut cut = cut_decode(of.kv_heads, tiles, keys.count * tiles_of_head, layout.tiles_per_share, threads);
  // The items that a thread does one after the other, in parts of one head, round by round.
  int64_t rounds = 0, way = 0;
  for (int64_t left = tiles / cut.heads; left > 0; left -= cut.round_groups, ++rounds) {
    way += ceil_div(std::min(left, cut.round_groups) * keys.count, threads) * cut.heads;
  }
  // The shortest way that is possible, and one item of it more for each round.
  const int64_t least = ceil_div(tiles * keys.count, threads);
  const bool room = cut.round_groups * cut.heads <= threads * layout.tiles_per_share;
  const bool short_way = 4 * way <= 5 * least + 4 * cut.heads;
  if (room && short_way && cut.heads <= most_decode_heads(of.kv_heads)) return true;
  std::printf(
      "%lld heads over %lld of %lld, %lld texts at %lld, %d threads: %lld heads together, %lld rounds, %lld "
      "parts of a head in a row, of at least %lld\n",
      static_cast<long long>(of.heads), static_cast<long long>(of.kv_heads), static_cast<long long>(of.width),
      static_cast<long long>(texts), static_cast<long long>(depth), threads, static_cast<long long>(cut.heads),
      static_cast<long long>(rounds), static_cast<long long>(way), static_cast<long long>(least));
  return false;
}

// Heads that lie together are one stream, which few threads take whole.
bool few_threads_read_streams() {
  const DecodeCut cut = cut_decode(8, 8, 4, 8, 2);
  if (cut.heads == 8) return true;
  std::printf("two threads take %lld heads together\n", static_cast<long long>(cut.heads));
  return false;
}

// The parts of a tile follow each other without a gap, and no two differ by more than a block.
bool parts_cover_keys(int64_t begin, int64_t end, int64_t kv_heads, int64_t splits) {
  const KeyParts keys(begin, end, kv_heads, splits);
  int64_t longest = 0, shortest = end;
  bool holds = keys.count >= 1 && keys.count <= splits && keys.first(0) == begin && keys.first(keys.count) == end;
  for (int64_t part = 0; part < keys.count; ++part) {
    const int64_t size = keys.first(part + 1) - keys.first(part);
    holds = holds && size > 0;
    longest = std::max(longest, size);
    shortest = std::min(shortest, ceil_div(size, kDecodeKeys) * kDecodeKeys);
  }
  holds = holds && longest - shortest <= kDecodeKeys;
  if (!holds) {
    std::printf("keys %lld to %lld in %lld parts: gaps, or parts of unlike sizes\n", static_cast<long long>(begin),
                static_cast<long long>(end), static_cast<long long>(keys.count));
  }
  return holds;
}

}  // namespace

int main() {
  bool holds = few_threads_read_streams();
  for (const Heads& of : {Heads{32, 8, 128}, {32, 4, 128}, {8, 8, 64}, {16, 8, 256}, {32, 32, 128}, {128, 1, 512}}) {
    for (const int threads : {1, 2, 7, 16, 32, 64, 128}) {
      for (const int64_t texts : {1, 4, 8, 16, 64}) {
        for (const int64_t depth : {4096, 32768}) holds = no_thread_waits(of, texts, depth, threads) && holds;
      }
    }
  }
  for (const int64_t splits : {1, 2, 4, 8, 16}) {
    for (const int64_t end : {1, 64, 65, 1000, 4096}) {
      holds = parts_cover_keys(0, end, 8, splits) && parts_cover_keys(end / 3, end, 1, splits) && holds;
    }
  }
  return holds ? 0 : 1;
}
