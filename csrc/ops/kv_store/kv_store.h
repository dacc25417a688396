// Family kv_store: converts rows of f32 to the type of the KV cache and stores them there.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> kv_store_variants();
std::string op_key(const KvStoreDesc& desc);
std::vector<Config> candidates(const KvStoreDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const KvStoreDesc& desc, const DeviceInfo& device);
Support supports(const KvStoreDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const KvStoreDesc& desc);
size_t scratch_bytes(const KvStoreDesc& desc, const Config& config);
// Throws PlanError for runs outside the batch or the cache.
void launch(const Config& config, const KvStoreDesc& desc, const KvStoreArgs& args, CpuContext& context);
void launch(const Config& config, const KvStoreDesc& desc, const KvStoreArgs& args, CudaStream& stream);

// Converts a row of `width` floats to the type of the cache, on the CPU; for other families that store rows.
void store_cache_row(CpuIsa isa, DType type, const float* x, std::byte* out, int64_t width);

}  // namespace dyno::ops
