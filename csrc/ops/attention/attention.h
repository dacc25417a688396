// Family attention: causal attention over the KV cache, with an online softmax; the score matrix is never whole.
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
// Clusters for each of `tiles` of latents. One tile takes as many as run at once, for a second wave doubles the time
// (32768 positions on an H200 with 8, 12, 14, 16 clusters: f16 50, 36, 32 and 45 us, f32 77, 54, 49 and 67). Several
// tiles take half of the multiprocessors, as they find the keys in L2 (128 heads on an H200: 48 us with one cluster a
// tile, 55 with two). Several tiles of a float32 cache take several waves, as its blocks take longer: then shorter ones
// leave less of the last wave empty (4096 positions, 4, 8, 16, 31 tiles: 35, 68, 127 and 210 us; by the rule for halves
// 42, 75, 148 and 221). At most 8: empty ones cost.
int64_t default_clusters(int64_t tiles, DType type, const DeviceInfo& device);
// Whether f32 keys and values of such heads go through tensor cores as pairs of halves.
bool attention_in_pairs(const AttentionDesc& desc, const DeviceInfo& device);
// The cache must already hold the keys and values of this batch's tokens. Throws PlanError for runs outside of the
// batch or the cache.
void launch(const Config& config, const AttentionDesc& desc, const AttentionArgs& args, CpuContext& context);
void launch(const Config& config, const AttentionDesc& desc, const AttentionArgs& args, CudaStream& stream);

}  // namespace dyno::ops
