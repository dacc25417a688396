// Family qkv_rope_store: norms of heads, rotary embedding and store in the KV cache for new q, k, v.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> qkv_rope_store_variants();
std::string op_key(const QkvRopeStoreDesc& desc);
std::vector<Config> candidates(const QkvRopeStoreDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const QkvRopeStoreDesc& desc, const DeviceInfo& device);
Support supports(const QkvRopeStoreDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const QkvRopeStoreDesc& desc);
size_t scratch_bytes(const QkvRopeStoreDesc& desc, const Config& config);
// Throws PlanError for a negative position or a run outside the cache (CPU; on a GPU the caller checks).
void launch(const Config& config, const QkvRopeStoreDesc& desc, const QkvRopeStoreArgs& args, CpuContext& context);
void launch(const Config& config, const QkvRopeStoreDesc& desc, const QkvRopeStoreArgs& args, CudaStream& stream);

}  // namespace dyno::ops
