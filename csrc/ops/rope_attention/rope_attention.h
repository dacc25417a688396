// Family rope_attention: norms of heads, rotary embedding, store of new k and v in the cache, and attention over the
// cache, for few tokens.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> rope_attention_variants();
std::string op_key(const RopeAttentionDesc& desc);
std::vector<Config> candidates(const RopeAttentionDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const RopeAttentionDesc& desc, const DeviceInfo& device);
Support supports(const RopeAttentionDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const RopeAttentionDesc& desc);
size_t scratch_bytes(const RopeAttentionDesc& desc, const Config& config);
// Throws PlanError for runs outside the batch or the cache (CPU; on a GPU the caller checks).
void launch(const Config& config, const RopeAttentionDesc& desc, const RopeAttentionArgs& args, CpuContext& context);
void launch(const Config& config, const RopeAttentionDesc& desc, const RopeAttentionArgs& args, CudaStream& stream);

}  // namespace dyno::ops
