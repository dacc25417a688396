// The kernels of few tokens (stream, ring, walk): the shapes that they support, and their defaults.
#include "ops/matmul/cuda/choice_stream.h"

#include <algorithm>
#include <optional>

#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/stripes.h"
#include "ops/matmul/cuda/walk.h"
#include "ops/matmul/gpu_layout.h"

namespace dyno::ops::cuda {

int64_t least_shared(const Shape& s, int warps, int stripes) {
  const int64_t columns = s.experts ? 1 : std::min<int64_t>(s.rows, 8);
  return stream_least_bytes(s.type, s.other.value_or(s.type), columns, warps, s.gated ? 2 : stripes);
}

Support supports_ring(const Shape& s, const Choice& choice, const DeviceInfo& device) {
  if (!has_bulk_copy(device)) {
    return Support::no(str_cat("ring needs compute capability 9.0 and code for it; the device has ",
                               device.compute_capability / 10, ".", device.compute_capability % 10,
                               ", the code is for ", kCompiledArchitectures));
  }
  const DType other = s.other.value_or(s.type);
  if (!has_block_codes(s.type) || !has_block_codes(other)) {
    return Support::no(
        str_cat("ring reads quantised weights, not ", dtype_name(has_block_codes(s.type) ? other : s.type)));
  }
  if (s.experts ? s.rows > kRingRows : s.rows > 1 || s.matrices > 1) {
    return Support::no(str_cat("ring multiplies one row by one matrix, or by experts at most ", kRingRows,
                               " rows, not ", s.rows, s.experts ? "" : str_cat(" by ", s.matrices)));
  }
  if (s.norm && s.x_rows > 1) return Support::no("ring normalises a single row only");
  const int64_t needed = ring_memory(s.type, other, s.k, s.x_rows, choice.blocks).bytes;
  if (needed > shared_of(device)) {
    return Support::no(str_cat("ring needs ", needed, " bytes of shared memory; a block has ", shared_of(device)));
  }
  return Support::yes();
}

Support supports_walk(const Shape& s, const Choice& choice) {
  if (!s.bytes) return Support::no("walk reads rows in bytes, which an earlier launch must have written");
  if (!s.experts || !s.gated || !has_block_codes(s.type)) {
    return Support::no(
        str_cat("walk multiplies gated pairs of experts with quantised weights, not ", dtype_name(s.type)));
  }
  if (s.rows > kWalkRows) return Support::no(str_cat(s.rows, " rows: walk takes at most ", kWalkRows));
  if (walk_units(s.k) < choice.warps) {
    return Support::no(str_cat("k=", s.k, " has ", walk_units(s.k), " units, fewer than warps=", choice.warps));
  }
  return Support::yes();
}

std::optional<int> stream_warps(int64_t blocks, int64_t k_tiles, const DeviceInfo& device) {
  constexpr int64_t kWarpsAtOnce = 16;  // on a multiprocessor
  for (const int warps : {16, 8, 4}) {
    if (warps > 4 && k_tiles < 2 * warps) continue;
    if (blocks * warps <= kWarpsAtOnce * std::max(device.sm_count, 1)) return warps;
  }
  return std::nullopt;
}

std::optional<Choice> default_ring(const Shape& s, int64_t tasks, int64_t segments, const DeviceInfo& device) {
  // For fewer bytes, the blocks of stream finish before the rings are full. A sum over experts costs stream a start for
  // each expert. Measured on an H200, as the rules below (h200_stream_defaults.json).
  const DType other = s.other.value_or(s.type);
  const int64_t least_bytes = int64_t{segments > 2 ? 16 : s.experts ? 20 : 25} << 20;
  Choice best{.kernel = Kernel::ring, .blocks = 2};
  const int64_t weights = tasks * segments * gpu_stripe_bytes(s.type, s.k);
  if (weights < least_bytes || !supports_ring(s, best, device)) return std::nullopt;
  const int64_t bytes = ring_memory(s.type, other, s.k, s.x_rows, best.blocks).bytes;
  if (best.blocks * bytes > shared_of(device)) return std::nullopt;
  // A block of the ring converts all of x. If it has few tasks, this is the larger part of its time; a warp of stream
  // converts no more than it multiplies. So stream is faster if its blocks of two stripes fit on the chip at once: four
  // of them on a multiprocessor, or two if they read much.
  constexpr int64_t kManyBytes = int64_t{48} << 20;
  const int64_t blocks = s.gated ? tasks : (tasks + 1) / 2, at_once = weights < kManyBytes ? 4 : 2;
  if (!(s.gated && s.experts) && blocks <= at_once * device.sm_count) return std::nullopt;
  // A partly filled chunk costs a step like a full one.
  if (!s.gated && segments == 1 && s.k % kChunkK != 0) return std::nullopt;
  const int64_t chunks = segments * ((s.k + kChunkK - 1) / kChunkK);
  int64_t least = 0;
  for (int share = 1; share <= kRingWarps; share *= 2) {
    const int64_t groups = int64_t{best.blocks} * std::max(device.sm_count, 1) * kRingWarps / share;
    // Of the start and the final sum, in chunks. Warps that share a task wait for each other, unless all of them wait
    // for the memory: bytes need no unpacking. Experts were measured with the lower cost.
    const int64_t task_cost = share == 1 || s.experts || gpu_format(s.type).low_bits == 8 ? 2 : 6;
    const int64_t steps = (tasks + groups - 1) / groups * ((chunks + share - 1) / share + task_cost);
    if (share == 1 || steps < least) least = steps, best.share = share;
  }
  return best;
}

Choice walk_choice(const Shape& s) {
  Choice choice{.kernel = Kernel::walk, .warps = 8, .blocks = 2};
  if (walk_units(s.k) < choice.warps) choice.warps = 4, choice.blocks = 4;
  return choice;
}

namespace {

// Whether the gated pairs of experts are enough for blocks that stay: more than the blocks of stream that fit at once.
// For several tokens, stream is faster with values of a table. Measured on an H200, for one token (h200_walk.json) and
// for two to four (h200_few_sequences.json), whose k gave all warps of a block the same number of units.
bool walks(const Shape& s, const DeviceInfo& device) {
  constexpr int64_t kBlocksAtOnce = 4;  // of four warps, on a multiprocessor
  constexpr int64_t kMostTokens = 4;
  const int64_t pairs = (s.n + kGpuRows - 1) / kGpuRows * s.rows;
  if (pairs <= kBlocksAtOnce * std::max(device.sm_count, 1)) return false;
  const Choice choice = walk_choice(s);
  if (!supports_walk(s, choice)) return false;
  return s.x_rows == 1 ||
         (s.x_rows <= kMostTokens && !gpu_format(s.type).lookup() && walk_units(s.k) % choice.warps == 0);
}

}  // namespace

// Measured on an H200 (benchmarks/results); the order of sizes is the same on other chips.
Choice default_stream(const Shape& s, const DeviceInfo& device) {
  if (walks(s, device)) return walk_choice(s);
  // Values of a table take longer to look up than the codes to load. Blocks of stream need no shared memory, so more
  // warps look them up at the same time; with experts, this is faster than the ring.
  const bool looks_up = s.experts && gpu_format(s.type).lookup();
  // So is stream with rows in bytes, which it need not convert (h200_few_tokens.json).
  if (s.rows == 1 || (s.experts && !looks_up && !s.bytes)) {
    const int64_t stripes = (s.n + kGpuRows - 1) / kGpuRows;
    if (const auto ring = default_ring(s, stripes * (s.experts ? s.rows : 1), s.gated ? 2 : 1, device)) return *ring;
  }
  const int64_t k_tiles = (s.k + kGpuTile - 1) / kGpuTile;
  const int64_t groups = s.experts ? s.rows : (s.rows + 7) / 8 * s.matrices;
  const bool single = has_block_codes(s.type) && (s.rows == 1 || s.experts);
  const bool row = single && !s.experts && s.matrices == 1;
  const int64_t units = (k_tiles + kUnitTiles - 1) / kUnitTiles, multiprocessors = std::max(device.sm_count, 1);
  // Where launches start early, blocks that occupy the whole chip leave no room for the next launch to ask for its
  // weights.
  const bool early = row && device.compute_capability >= 90;
  const auto warps = [&](int stripes) {
    const int64_t rows = s.gated ? kGpuRows : stripes * kGpuRows;
    // With two stripes, a quarter of a block's 16 warps may have no unit.
    const int64_t tiles = early && !s.gated && stripes == 2 && units >= 12 ? k_tiles * 4 / 3 : k_tiles;
    return stream_warps((s.n + rows - 1) / rows * groups, tiles, device).value_or(0);
  };
  const int one = s.gated ? 0 : warps(1), two = warps(2);
  // Two stripes share the conversion of x. So they are faster if a warp converts several units, or if a product has
  // only one, for which the other warps of its block wait. With more units, the weights take longer than x.
  constexpr int64_t kFewUnits = 2, kManyUnits = 3;  // of each of 16 warps
  const bool many = row && units >= kManyUnits * 16;
  const bool shares = single && (units == 1 || (two == 16 && units >= kFewUnits * 16 && !(many && one == 16)));
  // Behind a batch, 16 warps with two stripes find no room to start early: they need all registers of a multiprocessor.
  const int64_t stripes = stream_blocks(s.n, 1), pairs = stream_blocks(s.n, 2);
  const bool few = stripes <= multiprocessors * 3 / 4, full = stripes > multiprocessors;
  const bool crowds = early && one == two && (one == 16 ? !few && !many && !s.after_batch : full);
  Choice choice{Kernel::stream, 0, 0, 2};
  if (one > 0 && one >= two && !(two > 0 && (shares || crowds))) {
    choice.warps = one;
    choice.stripes = 1;
  } else {
    // Several rounds: enough warps for a long k, and few warps if there are many blocks anyway.
    choice.warps = two > 0 ? two : s.n > 65536 || k_tiles < 16 || (single && s.gated) ? 4 : 8;
  }
  if (early && s.gated) {
    if (choice.warps == 8 && units < 2 * 8) choice.warps = 4;
  } else if (row && choice.warps == 16) {
    const int64_t three = stream_blocks(s.n, kTrio);
    if (early && choice.stripes == 2 && units <= 16 && pairs > multiprocessors * 9 / 10) choice.warps = 8;
    // Bytes need no unpacking, so their blocks wait for the memory. Three stripes for each two blocks are faster if
    // these are as many as the multiprocessors; for weights of fewer bits and for a longer or shorter k they are not.
    const bool fills = three <= multiprocessors && three > multiprocessors * 9 / 10 && !s.other;
    if (gpu_format(s.type).low_bits == 8 && choice.stripes == 2 && shares && !many && fills) choice.stripes = kTrio;
  }
  while (choice.warps > 4 && least_shared(s, choice.warps, choice.stripes) > shared_of(device)) {
    choice.warps /= 2;
  }
  return choice;
}

}  // namespace dyno::ops::cuda
