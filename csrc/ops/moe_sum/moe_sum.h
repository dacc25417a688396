// Family moe_sum: the weighted sum of the experts' outputs and the residual.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> moe_sum_variants();
std::string op_key(const MoeSumDesc& desc);
std::vector<Config> candidates(const MoeSumDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MoeSumDesc& desc, const DeviceInfo& device);
Support supports(const MoeSumDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MoeSumDesc& desc);
size_t scratch_bytes(const MoeSumDesc& desc, const Config& config);
// `out` may be `residual`.
void launch(const Config& config, const MoeSumDesc& desc, const MoeSumArgs& args, CpuContext& context);
void launch(const Config& config, const MoeSumDesc& desc, const MoeSumArgs& args, CudaStream& stream);

}  // namespace dyno::ops
