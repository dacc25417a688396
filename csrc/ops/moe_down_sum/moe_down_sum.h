// Family moe_down_sum: the down products of a token's experts, their weighted sum and the residual in one launch. On
// the CPU these are two ops.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> moe_down_sum_variants();
std::string op_key(const MoeDownSumDesc& desc);
std::vector<Config> candidates(const MoeDownSumDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MoeDownSumDesc& desc, const DeviceInfo& device);
Support supports(const MoeDownSumDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MoeDownSumDesc& desc);
size_t scratch_bytes(const MoeDownSumDesc& desc, const Config& config);
void launch(const Config& config, const MoeDownSumDesc& desc, const MoeDownSumArgs& args, CudaStream& stream);

}  // namespace dyno::ops
