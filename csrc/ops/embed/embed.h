// Family embed: rows of a (quantised) table by token id, as f32.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> embed_variants();
std::string op_key(const EmbedDesc& desc);
std::vector<Config> candidates(const EmbedDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const EmbedDesc& desc, const DeviceInfo& device);
Support supports(const EmbedDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const EmbedDesc& desc);
size_t scratch_bytes(const EmbedDesc& desc, const Config& config);
// Throws PlanError for an id outside the table.
void launch(const Config& config, const EmbedDesc& desc, const EmbedArgs& args, CpuContext& context);
void launch(const Config& config, const EmbedDesc& desc, const EmbedArgs& args, CudaStream& stream);

}  // namespace dyno::ops
