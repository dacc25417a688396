// Family moe_up_gate: up_gate per token and chosen expert.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> moe_up_gate_variants();
std::string op_key(const MoeUpGateDesc& desc);
std::vector<Config> candidates(const MoeUpGateDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MoeUpGateDesc& desc, const DeviceInfo& device);
Support supports(const MoeUpGateDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MoeUpGateDesc& desc);
size_t scratch_bytes(const MoeUpGateDesc& desc, const Config& config);
// Whether the launch that chose the experts has completed when the next launch starts (MoeDownSumArgs::settled).
bool settles_ids(const Config& config, const MoeUpGateDesc& desc);
// Whether a shared expert's pair (desc.shared) can be part of this launch for one token's experts.
bool takes_shared(const MoeUpGateDesc& desc, const DeviceInfo& device);
void launch(const Config& config, const MoeUpGateDesc& desc, const MoeUpGateArgs& args, CpuContext& context);
void launch(const Config& config, const MoeUpGateDesc& desc, const MoeUpGateArgs& args, CudaStream& stream);

}  // namespace dyno::ops
