// Family rope: rotary position embedding, in place.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> rope_variants();
std::string op_key(const RopeDesc& desc);
std::vector<Config> candidates(const RopeDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const RopeDesc& desc, const DeviceInfo& device);
Support supports(const RopeDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const RopeDesc& desc);
size_t scratch_bytes(const RopeDesc& desc, const Config& config);
// Positions must not be negative.
void launch(const Config& config, const RopeDesc& desc, const RopeArgs& args, CpuContext& context);
void launch(const Config& config, const RopeDesc& desc, const RopeArgs& args, CudaStream& stream);

}  // namespace dyno::ops
