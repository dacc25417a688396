// Family attention: causal attention over the KV cache with an online softmax, without storing the score matrix.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> attention_variants();
std::string op_key(const AttentionDesc& desc);
std::vector<Config> candidates(const AttentionDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const AttentionDesc& desc, const DeviceInfo& device);
Support supports(const AttentionDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const AttentionDesc& desc);
size_t scratch_bytes(const AttentionDesc& desc, const Config& config);
// The default number of clusters for each of `tiles` tiles of latents. One tile gets as many clusters as run at once,
// because a second wave doubles the time. Several tiles together get half of the multiprocessors, because they find the
// keys in L2. Several tiles of a float32 cache get enough clusters for several waves: its blocks take longer, and
// shorter blocks leave less of the last wave empty. At most 8 per tile, because empty clusters cost time. Times:
//   one tile, 32768 positions, H200; 8, 12, 14, 16 clusters: f16 50, 36, 32, 45 us; f32 77, 54, 49, 67 us
//   128 heads, H200; 1 or 2 clusters per tile: 48, 55 us
//   f32, 4096 positions; 4, 8, 16, 31 tiles: 35, 68, 127, 210 us; by the rule for f16 42, 75, 148, 221 us
int64_t default_clusters(int64_t tiles, DType type, const DeviceInfo& device);
// Whether f32 keys and values of such heads are multiplied on tensor cores as f16 pairs; or with desc.paired, whether
// keys and values that are f16 pairs in memory are supported.
bool attention_in_pairs(const AttentionDesc& desc, const DeviceInfo& device);
// Whether a launch over one token of each of desc.m sequences, with up to `depth` positions each, leaves the keys of a
// sequence in one part, so that it can write f16 tiles.
bool steps_in_one_part(const AttentionDesc& desc, const Config& config, int64_t depth, const DeviceInfo& device);
// The cache must already have the keys and values of this batch's tokens. Throws PlanError for runs outside the batch
// or the cache.
void launch(const Config& config, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context);
void launch(const Config& config, const AttentionDesc& desc, const AttentionArgs& args, CudaStream& stream);

}  // namespace dyno::ops
