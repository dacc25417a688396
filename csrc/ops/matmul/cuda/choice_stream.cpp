// The kernels of few tokens (stream, ring, walk): the shapes that they support, and their defaults.
#include "ops/matmul/cuda/choice_stream.h"

#include <algorithm>
#include <optional>

#include "ops/matmul/cuda/ring.h"
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
  // each expert.
  const DType other = s.other.value_or(s.type);
  const int64_t least_bytes = int64_t{segments > 2 ? 16 : 20} << 20;
  constexpr int64_t kTaskCost = 2;  // of the start and the final sum, in chunks
  Choice best{.kernel = Kernel::ring, .blocks = 2};
  if (tasks * segments * gpu_stripe_bytes(s.type, s.k) < least_bytes || !supports_ring(s, best, device)) {
    return std::nullopt;
  }
  const int64_t bytes = ring_memory(s.type, other, s.k, s.x_rows, best.blocks).bytes;
  if (best.blocks * bytes > shared_of(device)) return std::nullopt;
  // A block of the ring converts all of x. If it has one or two tasks, this is the larger part of its time; a warp of
  // stream converts no more than it multiplies.
  constexpr int64_t kFewTasks = 3;  // per multiprocessor
  if (!s.gated && tasks <= kFewTasks * device.sm_count) return std::nullopt;
  // A partly filled chunk costs a step like a full one.
  if (!s.gated && segments == 1 && s.k % kChunkK != 0) return std::nullopt;
  const int64_t chunks = segments * ((s.k + kChunkK - 1) / kChunkK);
  int64_t least = 0;
  for (int share = 1; share <= kRingWarps; share *= 2) {
    const int64_t at_once = int64_t{best.blocks} * std::max(device.sm_count, 1) * kRingWarps / share;
    const int64_t steps = (tasks + at_once - 1) / at_once * ((chunks + share - 1) / share + kTaskCost);
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

// Whether the gated pairs of a token's experts are enough for blocks that stay: more than the blocks of stream that fit
// at once. Measured on an H200 (h200_walk.json), for one token.
bool walks(const Shape& s, const DeviceInfo& device) {
  constexpr int64_t kBlocksAtOnce = 4;  // of four warps, on a multiprocessor
  const int64_t pairs = (s.n + kGpuRows - 1) / kGpuRows * s.rows;
  return s.x_rows == 1 && pairs > kBlocksAtOnce * std::max(device.sm_count, 1) && supports_walk(s, walk_choice(s)).ok;
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
  const auto warps = [&](int stripes) {
    const int64_t rows = s.gated ? kGpuRows : stripes * kGpuRows;
    return stream_warps((s.n + rows - 1) / rows * groups, k_tiles, device).value_or(0);
  };
  const int one = s.gated ? 0 : warps(1), two = warps(2);
  // Two stripes share the conversion of x. So they are faster if a warp converts several units, or if a product has
  // only one, for which the other warps of its block wait.
  const bool single = has_block_codes(s.type) && (s.rows == 1 || s.experts);
  const bool shares = single && (k_tiles <= kUnitTiles || (two == 16 && k_tiles >= int64_t{2} * 16 * kUnitTiles));
  Choice choice{Kernel::stream, 0, 0, 2};
  if (one > 0 && one >= two && !(two > 0 && shares)) {
    choice.warps = one;
    choice.stripes = 1;
  } else {
    // Several rounds: enough warps for a long k, and few warps if there are many blocks anyway.
    choice.warps = two > 0 ? two : s.n > 65536 || k_tiles < 16 || (single && s.gated) ? 4 : 8;
  }
  while (choice.warps > 4 && least_shared(s, choice.warps, choice.stripes) > shared_of(device)) {
    choice.warps /= 2;
  }
  return choice;
}

}  // namespace dyno::ops::cuda
