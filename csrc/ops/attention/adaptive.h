// The choice of a kernel, its query rows and its parts of the keys for one launch of attention over few tokens (variant
// `adaptive`). Only a launch knows how many sequences its tokens belong to, and how many positions these have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/device_info.h"
#include "ops/args.h"
#include "ops/op.h"

namespace dyno::ops {

// The properties of a launch that determine its division.
struct LaunchShape {
  int64_t m = 1, n_runs = 1;
  std::span<const SequenceRun> runs{};  // in host memory; empty: the tokens may be distributed in any way
  int64_t heads = 1, kv_heads = 1;
  int64_t width = 1;  // the larger of a key's and a value's dimensions
  int64_t keys = 1;   // upper bound of the keys that a token reads
  DType type = DType::f16;
  double key_bytes = 1;  // of a key and its value of one head

  // Whether every token is of another sequence.
  bool steps() const { return n_runs == m; }
  // Tiles of `rows` query rows, for each kv head.
  int64_t tiles(int64_t rows) const;
};
LaunchShape launch_shape(const AttentionDesc& desc, const AttentionArgs& args);
// At most `parts`, so that each part of a tile's keys has at least `keys` of them. A launch with one part needs no
// other launch that adds parts.
int parts_of_keys(const LaunchShape& shape, int parts, int keys);

// Whether steps.cuh has a kernel for one token of each sequence.
bool steps_shape(const AttentionDesc& desc);

// Query rows of a block of `direct`: 8 if every run has one token and its heads of a kv head are not more, because a
// block of 8 rows needs half the registers of a block of 16; otherwise `most`.
int direct_rows(const LaunchShape& shape, int most);

enum class AdaptiveKernel : uint8_t { direct, direct_fused, steps, flash, token, token_cluster };

struct AdaptiveChoice {
  AdaptiveKernel kernel = AdaptiveKernel::direct;
  int rows = 0;
  int parts = 1;    // of the keys
  double time = 0;  // estimate in nanoseconds on an H200
};

// Between kernels, the one with larger blocks is preferred at this ratio of the times: it reads the cache less often.
inline constexpr double kPreferred = 1.05;

// A launch with this division, and its time.
AdaptiveChoice divided(AdaptiveKernel kernel, int rows, int parts, const LaunchShape& shape, const DeviceInfo& device);

// The fastest division for a kernel with blocks of `rows` query rows, and at most `most` parts. It depends only on the
// arguments, so that a captured launch computes the same as a plain one.
AdaptiveChoice best_division(AdaptiveKernel kernel, int rows, int most, const LaunchShape& shape,
                             const DeviceInfo& device);

// The kernels of family attention that support a description, in addition to `direct` with blocks of 8 rows.
struct AdaptiveKernels {
  bool steps, sixteens, flash;
};
AdaptiveChoice best_kernel(const AdaptiveKernels& kernels, const LaunchShape& shape, const DeviceInfo& device);

// Upper bound of the blocks of a launch with more than one part, by the rows of a block.
constexpr int64_t adaptive_most_blocks(int rows) { return rows > 16 ? 264 : 1056; }
// Workspace for any choice.
constexpr size_t adaptive_scratch_bytes(int64_t dv) {
  const int64_t rows = std::max(adaptive_most_blocks(64) * 64, adaptive_most_blocks(16) * 16);
  return static_cast<size_t>(rows * (2 + dv)) * sizeof(float);
}

// The variant and parameters of a launch of variant adaptive.
Config launch_config(const AttentionDesc& desc, const LaunchShape& shape, const DeviceInfo& device);
Config launch_config(const RopeAttentionDesc& desc, const LaunchShape& shape, const DeviceInfo& device);

}  // namespace dyno::ops
