#include "ops/attention/adaptive.h"

#include <algorithm>
#include <array>

#include "ops/attention/attention.h"
#include "ops/attention/kernels_cuda.h"

namespace dyno::ops {
namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Numbers of parts, at most a half or so apart. They leave a few multiprocessors of an H200 free: 128 or 120 blocks are
// faster than 132.
constexpr std::array<int, 17> kParts = {1, 2, 3, 4, 5, 6, 8, 11, 16, 22, 30, 44, 64, 80, 96, 110, 128};
// A part has at least as many keys as a block reads in one step.
constexpr int64_t kLeastKeys = int64_t{kDirectWarps} * 16;
// Multiprocessors are grouped by up to 18, and a cluster of eight runs within one group: two clusters fill a group.
constexpr int64_t kMultiprocessorsOfCluster = 9;
// More parts must save this share of the time, because estimates are not exact.
constexpr double kLeastGain = 0.02;

// Times in nanoseconds on an H200, fitted to benchmarks/results/h200_attention_parts.json; those of a single token to
// h200_added_parts.json. Only their ratios matter.
struct Speed {
  double block;             // of a block apart from its keys
  double key;               // of a key for a block that has its multiprocessor for itself
  double add, part;         // of the launch that adds parts, and of each part
  double rate = 30;         // bytes that the blocks of a multiprocessor read in a nanosecond at most
  double block_rate = 41;   // of a block, because a few blocks do not reach the rate of the memory
  int at_once = 1;          // blocks on a multiprocessor
  double beside = 1;        // slowdown of a block that shares its multiprocessor
  double beside_rate = 30;  // their bytes in a nanosecond
  int joined = 1;    // parts that a cluster adds without memory; it has so many blocks, even if some have no keys
  double later = 1;  // of the time of a block, if it waits for others
};

Speed speed_of(AdaptiveKernel kernel, int rows, const LaunchShape& shape) {
  const auto width = static_cast<double>(shape.width);
  const bool staged = shape.type == DType::q8_0, fused = kernel == AdaptiveKernel::direct_fused;
  switch (kernel) {
    case AdaptiveKernel::token:
      return {.block = 1500, .key = 4.2 + 0.044 * width, .add = 1700, .part = 50, .rate = 39, .block_rate = 51};
    case AdaptiveKernel::token_cluster:
      return {.block = 2850,
              .key = 3.5 + 0.034 * width,
              .add = 2500,
              .part = 0,
              .block_rate = 51,
              .joined = kClusterBlocks,
              .later = 0.43};
    case AdaptiveKernel::flash:
      // Rows of q8_0 are converted on their way to shared memory.
      if (staged) return {.block = 20000, .key = 75, .add = 3500, .part = 60};
      return {.block = 7300, .key = 5.6 + 0.0375 * width, .add = 3500, .part = 60};
    case AdaptiveKernel::steps:
      return {.block = 5000, .key = 3 + 0.09 * width, .add = 0, .part = 0, .rate = 22, .at_once = 2, .beside = 2};
    default:
      break;
  }
  const double add = 590, part = 61;
  // The kernels without rotation for halves of wide heads move registers to memory.
  const double apart = staged ? 5500 : shape.width <= 64 ? 6000 : 13000;
  if (rows == 16) {
    const double key = staged ? 5 + 0.086 * width : 6.5 + 0.125 * width;
    return {.block = fused ? 5500 : apart + 1500, .key = key, .add = add, .part = part};
  }
  const bool two = shape.width <= 64 || (shape.width <= 128 && (!fused || staged));
  return {.block = fused ? (staged ? 3500 : 2500) : apart,
          .key = (staged ? 5 + 0.096 * width : 5.6 + 0.12 * width) * (shape.steps() ? 1 : 1.07),
          .add = add,
          .part = part,
          .rate = 27,
          .at_once = two ? 2 : 1,
          .beside = staged || shape.width <= 64 ? 1.25 : 1.65};
}

double estimate(const Speed& speed, const LaunchShape& shape, int64_t tiles, int64_t parts, int64_t chip) {
  const int64_t each = std::max(ceil_div(shape.keys, parts), kLeastKeys);
  const int64_t active = ceil_div(shape.keys, each);
  const int64_t blocks = ceil_div(tiles * (speed.joined > 1 ? parts : active), chip);  // of a multiprocessor
  const auto keys = static_cast<double>(ceil_div(each, kLeastKeys) * kLeastKeys);      // whole steps
  const auto full = static_cast<double>(blocks / speed.at_once), rest = static_cast<double>(blocks % speed.at_once);
  const double alone = speed.block + speed.key * keys, beside = speed.block + speed.key * speed.beside * keys;
  const double busy = speed.at_once == 1 ? (1 + speed.later * (full - 1)) * alone : full * beside + rest * alone;
  const double bytes = static_cast<double>(shape.n_runs * shape.kv_heads * shape.keys) * shape.key_bytes;
  const double rate = blocks < 2 || speed.at_once == 1 ? speed.rate : speed.beside_rate;
  const double reached =
      std::min(rate * static_cast<double>(chip), speed.block_rate * static_cast<double>(tiles * active));
  return std::max(busy, speed.block + bytes / reached) +
         (active > speed.joined ? speed.add + speed.part * static_cast<double>(active) : 0.0);
}

}  // namespace

int64_t LaunchShape::tiles(int64_t rows) const {
  const AttentionTiles tiles{rows, heads / kv_heads};
  // A captured launch is repeated for any runs of as many tokens, each of which has one.
  if (runs.empty() || steps()) return tiles.bound(m, n_runs);
  int64_t sum = 0;
  for (const SequenceRun& run : runs) sum += tiles.of_run(run.n_tokens);
  return sum;
}

LaunchShape launch_shape(const AttentionDesc& desc, const AttentionArgs& args) {
  const int64_t depth = args.depth > 0 ? args.depth : args.slot_positions;
  // A tile of a run's tokens reads the windows of all of them.
  const int64_t keys = desc.windowed ? std::min(depth, args.window + desc.m - 1) : depth;
  const DType v_type = desc.v_in_k ? desc.k_type : desc.v_type;
  const size_t values = desc.v_in_k ? 0 : row_bytes(v_type, desc.dv);
  return {.m = desc.m,
          .n_runs = args.n_runs,
          .runs = {args.host_runs, args.host_runs == nullptr ? 0 : static_cast<size_t>(args.n_runs)},
          .heads = desc.heads,
          .kv_heads = desc.kv_heads,
          .width = std::max(desc.dk, desc.dv),
          .keys = std::max<int64_t>(1, keys),
          .type = desc.k_type,
          .key_bytes = static_cast<double>(row_bytes(desc.k_type, desc.dk) + values)};
}

int parts_of_keys(const LaunchShape& shape, int parts, int keys) {
  return static_cast<int>(std::min<int64_t>(parts, ceil_div(shape.keys, keys)));
}

bool steps_shape(const AttentionDesc& desc) {
  const bool halves = desc.k_type == desc.v_type && (desc.k_type == DType::f16 || desc.k_type == DType::bf16);
  const bool heads = desc.dk == desc.dv && (desc.dk == 64 || desc.dk == 128);
  return halves && heads && desc.heads / desc.kv_heads <= kStepsRows && !desc.v_in_k && !desc.softcap && !desc.exact;
}

int direct_rows(const LaunchShape& shape, int most) {
  return shape.steps() && shape.heads / shape.kv_heads <= 8 ? 8 : most;
}

AdaptiveChoice divided(AdaptiveKernel kernel, int rows, int parts, const LaunchShape& shape, const DeviceInfo& device) {
  const int64_t tiles = shape.tiles(rows) * shape.kv_heads;
  // The blocks of a cluster wait until all of them can start.
  const int64_t chip = kernel == AdaptiveKernel::token_cluster
                           ? device.sm_count / kMultiprocessorsOfCluster * kClusterBlocks
                           : device.sm_count;
  return {kernel, rows, parts,
          estimate(speed_of(kernel, rows, shape), shape, tiles, parts, std::max<int64_t>(1, chip))};
}

AdaptiveChoice best_division(AdaptiveKernel kernel, int rows, int most, const LaunchShape& shape,
                             const DeviceInfo& device) {
  const int64_t tiles = shape.tiles(rows) * shape.kv_heads;
  AdaptiveChoice best = divided(kernel, rows, 1, shape, device);
  for (const int number : kParts) {
    const int parts = std::min(number, most);
    if (tiles * parts > adaptive_most_blocks(rows) || shape.keys <= (parts - 1) * kLeastKeys) break;
    const AdaptiveChoice other = divided(kernel, rows, parts, shape, device);
    if (other.time < best.time * (1 - kLeastGain)) best = other;
    if (parts == most) break;
  }
  return best;
}

int64_t default_clusters(int64_t tiles, DType type, const DeviceInfo& device) {
  const bool waves = tiles > 1 && type == DType::f32;
  if (tiles == 1) return std::max<int64_t>(1, device.sm_count / kMultiprocessorsOfCluster);
  const int64_t blocks = waves ? 4 * device.sm_count : device.sm_count / 2;
  const int64_t clusters = std::max<int64_t>(1, blocks / (tiles * kClusterBlocks));
  return waves ? std::min<int64_t>(clusters, kMostClusters / 2) : clusters;
}

AdaptiveChoice best_kernel(const AdaptiveKernels& kernels, const LaunchShape& shape, const DeviceInfo& device) {
  AdaptiveChoice best = best_division(AdaptiveKernel::direct, 8, kMostSplits, shape, device);
  const bool eights = direct_rows(shape, 16) == 8;
  if (eights && kernels.steps) {
    // Without parts, the next product may read its rows as f16 tiles.
    const AdaptiveChoice steps = divided(AdaptiveKernel::steps, 8, 1, shape, device);
    return steps.time <= 1.1 * best.time ? steps : best;
  }
  const auto consider = [&](AdaptiveKernel kernel, int rows, int most) {
    const AdaptiveChoice other = best_division(kernel, rows, most, shape, device);
    if (other.time < kPreferred * best.time) best = other;
  };
  if (kernels.sixteens && !eights) consider(AdaptiveKernel::direct, 16, kMostSplits);
  if (kernels.flash) consider(AdaptiveKernel::flash, 64, kFlashMostSplits);
  return best;
}

}  // namespace dyno::ops
