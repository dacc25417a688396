// The way of q8_0 rows through shared memory (direct.cuh). A block of q8_0 has 34 bytes. So a lane can load only two of
// them at a time from the cache, but rows of all heads together often are a multiple of 16 bytes. Each warp copies
// rows of its tiles into a ring of its own, in pieces of 16 bytes, and reads the codes there in words of four bytes.
//
// The first piece begins at the last multiple of 16 bytes before the head, so pieces may include a few bytes of other
// heads of the same row. Heads have 64 dimensions or a multiple, so that they and every second block begin at multiples
// of four bytes: the distance of a block's codes from such a multiple is known to the compiler.
//
// Rows are an odd number of pieces apart. Therefore a warp's reads have no bank conflicts: of keys, lane 4·g + t reads
// words t and t + 4 of each block of rows g and g + 8; of values, it reads word g of each block of rows 2·t, 2·t + 1,
// 2·t + 8, 2·t + 9.
//
// A warp copies keys two tiles ahead and values one: three half tiles are in flight while it multiplies the fourth.
#pragma once

#include "ops/attention/direct_pieces.cuh"
#include "ops/attention/tile.cuh"

namespace dyno::ops::direct {

inline constexpr int kTileKeys = 16;

// The codes of word `at` of block `block`, where `row` is the row's first byte.
__device__ __forceinline__ uint32_t staged_codes(const uint8_t* row, int block, int at) {
  const uint8_t* from = row + 34 * block + 2 + 4 * at;
  if (block % 2 == 1) return *reinterpret_cast<const uint32_t*>(from);
  const auto* words = reinterpret_cast<const uint32_t*>(from - 2);
  return __byte_perm(words[0], words[1], 0x5432);
}
__device__ __forceinline__ uint16_t staged_scale(const uint8_t* row, int block) {
  return *reinterpret_cast<const uint16_t*>(row + 34 * block);
}

// kWidth: dimensions of a warp. kKeys, kValues: which caches are staged. kFused: rows of new tokens are in shared
// memory instead of the cache.
template <int kWidth, bool kKeys, bool kValues, bool kFused>
struct Stage {
  static constexpr int kRowBytes = kWidth / 32 * 34, kPieces = direct_staged_pieces(kWidth), kPitch = 16 * kPieces;
  static constexpr int kTileBytes = kTileKeys * kPitch;
  static constexpr int kWarpBytes = (kKeys + kValues) * kStagedTiles * kTileBytes;
  static constexpr int kPending = kKeys && kValues ? 2 : 1;  // groups of copies that may be in flight at a wait
  // Lanes copy all pieces of a row but the last one next to each other, then the last pieces of all rows.
  static constexpr int kMain = kPieces - 1, kAtOnce = 32 / kMain;
  static_assert(kPieces % 2 == 1 && 32 % kMain == 0 && kTileKeys % kAtOnce == 0 && kStagedTiles == 2);

  struct Cache {
    const uint8_t* main;  // this lane's piece of row lane / kMain, and its last piece of row `lane`
    const uint8_t* last;
    int stride;
    uint8_t* tiles;
    int shift;  // first byte of a head in its first piece
  };
  Cache keys, values;
  const uint8_t* stored;  // rows of new tokens, [cache][token][2 * kWidth + 16 bytes]
  int lane, step, end, fresh_begin, settled_end;
  int key_at, value_at;  // first byte that this lane reads of a tile
  int slot = 0;          // of the current tile

  // `ring`: kWarpBytes for this warp. `step`: keys between two of its tiles.
  __device__ Stage(uint8_t* ring, const uint8_t* key_rows, int64_t key_stride, const uint8_t* value_rows,
                   int64_t value_stride, const uint8_t* stored, int lane, int step, int end, int fresh_begin)
      : stored(stored), lane(lane), step(step), end(end), fresh_begin(fresh_begin), settled_end(min(end, fresh_begin)) {
    keys = cache_of(key_rows, key_stride, ring);
    values = cache_of(value_rows, value_stride, ring + (kKeys ? kStagedTiles * kTileBytes : 0));
    key_at = lane / 4 * kPitch + keys.shift;
    value_at = lane % 4 * 2 * kPitch + values.shift;
    // Otherwise the compiler computes them again for each tile.
    if constexpr (kKeys || kValues) asm volatile("" : "+r"(key_at), "+r"(value_at));
  }
  __device__ Cache cache_of(const uint8_t* rows, int64_t stride, uint8_t* tiles) const {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(rows) % 16);
    const uint8_t* aligned = rows - shift;
    return {aligned + lane / kMain * stride + lane % kMain * 16, aligned + lane * stride + kMain * 16,
            static_cast<int>(stride), tiles, shift};
  }

  // Starts to copy rows of a tile. Rows past the end become zeros, because a weight of 0 times a value must be 0.
  __device__ void copy(const Cache& cache, int first, int of_slot, Rows which) const {
    const uint32_t to = device::shared_address(cache.tiles + of_slot * kTileBytes);
    const int64_t before = int64_t{first} * cache.stride;
    const uint8_t *const main = cache.main + before, *const last = cache.last + before;
    const auto each = [&](const auto& piece) {
#pragma unroll
      for (int row = 0; row < kTileKeys; row += kAtOnce) {
        piece(row + lane / kMain, to + row * kPitch + lane / kMain * kPitch + lane % kMain * 16,
              main + row * cache.stride);
      }
      if (lane < kTileKeys) piece(lane, to + lane * kPitch + kMain * 16, last);
    };
    if (which != Rows::fresh && first + kTileKeys <= (which == Rows::all ? end : settled_end)) {
      return each([&](int, uint32_t at, const uint8_t* from) { device::copy_async_16(at, from, true); });
    }
    each([&](int row, uint32_t at, const uint8_t* from) {
      const int key = first + row;
      const bool valid = key < end, is_fresh = valid && key >= fresh_begin;
      if (which == Rows::all || is_fresh == (which == Rows::fresh)) {
        device::copy_async_16(at, valid ? from : cache.main, valid);
      }
    });
  }
  // The same for a tile of the ring, which may not exist; the copies are a group.
  __device__ void copy_group(const Cache& cache, int first, int of_slot, Rows which) const {
    if (first < end) copy(cache, first, of_slot, which);
    device::copy_async_commit();
  }

  // The first tiles of the warp, from key `first` on. `fresh` follows `settled` if the previous launch writes rows of
  // these tiles: its groups come in the same order, so that waits for them include the earlier ones.
  __device__ void begin(int first, Rows which) const {
    if (kFused && which == Rows::fresh) return;  // ready_*() takes them
    if constexpr (kKeys) copy_group(keys, first, 0, which);
    if constexpr (kValues) copy_group(values, first, 0, which);
    if constexpr (kKeys) copy_group(keys, first + step, 1, which);
  }

  // Copies rows of new tokens.
  __device__ void fill(const Cache& cache, int first, int of_cache) const {
    if (first + kTileKeys <= fresh_begin) return;
    for (int key = max(first, fresh_begin); key < min(first + kTileKeys, end); ++key) {
      const int at = of_cache * kFusedAttentionTokens + key - fresh_begin;
      const auto* from = reinterpret_cast<const uint32_t*>(stored + at * (2 * kWidth + 16));
      auto* to = reinterpret_cast<uint32_t*>(cache.tiles + slot * kTileBytes + (key - first) * kPitch + cache.shift);
      for (int i = lane; i < kRowBytes / 4; i += 32) to[i] = from[i];
    }
    __syncwarp();  // the rows are written
  }

  // Waits for the keys of the tile at `first`. All lanes have read the previous values, whose memory is used again.
  __device__ void ready_keys(int first) const {
    if constexpr (kKeys) device::copy_async_wait<kPending>();
    __syncwarp();  // the copies of all lanes have arrived
    if constexpr (kValues) copy_group(values, first + step, 1 - slot, kFused ? Rows::settled : Rows::all);
    if constexpr (kKeys && kFused) fill(keys, first, 0);
  }
  // The same for its values. All lanes have read the keys.
  __device__ void ready_values(int first) const {
    if constexpr (kValues) device::copy_async_wait<kPending>();
    __syncwarp();
    if constexpr (kKeys) copy_group(keys, first + 2 * step, slot, kFused ? Rows::settled : Rows::all);
    if constexpr (kValues && kFused) fill(values, first, 1);
  }
  __device__ void next() { slot = 1 - slot; }

  // Of key g + `row` of the tile and block `block`, the dimensions 4·t … and 16 + 4·t ….
  __device__ Piece<Scalar::q8_0> key(int row, int block) const {
    const uint8_t* from = keys.tiles + key_at + slot * kTileBytes + row * kPitch;
    const uint8_t* mine = from + lane % 4 * 4;
    return {{staged_codes(mine, block, 0), staged_codes(mine, block, 4)}, staged_scale(from, block)};
  }
  // Of value 2·t + `row` of the tile and blocks `block` and `block` + 1, the dimensions 4·g ….
  __device__ BlockPair value(int row, int block) const {
    const uint8_t* from = values.tiles + value_at + slot * kTileBytes + row * kPitch;
    const uint8_t* mine = from + lane / 4 * 4;
    return {{staged_codes(mine, block, 0), staged_codes(mine, block + 1, 0)},
            {staged_scale(from, block), staged_scale(from, block + 1)}};
  }
};

}  // namespace dyno::ops::direct
