// Family moe_route: chooses experts and their weights from router logits.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> moe_route_variants();
std::string op_key(const MoeRouteDesc& desc);
std::vector<Config> candidates(const MoeRouteDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MoeRouteDesc& desc, const DeviceInfo& device);
Support supports(const MoeRouteDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MoeRouteDesc& desc);
size_t scratch_bytes(const MoeRouteDesc& desc, const Config& config);
// Throws PlanError for a pinned id that is not an expert.
void launch(const Config& config, const MoeRouteDesc& desc, const MoeRouteArgs& args, CpuContext& context);
void launch(const Config& config, const MoeRouteDesc& desc, const MoeRouteArgs& args, CudaStream& stream);

}  // namespace dyno::ops
