// Family kv_store: rows of f32 into their cells of the KV cache, converted to its type.
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
// Throws PlanError for runs outside of the batch or the cache.
void launch(const Config& config, const KvStoreDesc& desc, const KvStoreArgs& args, CpuContext& context);
void launch(const Config& config, const KvStoreDesc& desc, const KvStoreArgs& args, CudaStream& stream);

// A row of `width` floats as the cache holds it; on the CPU, where other families store as well.
void store_cache_row(CpuIsa isa, DType type, const float* x, std::byte* out, int64_t width);

}  // namespace dyno::ops
