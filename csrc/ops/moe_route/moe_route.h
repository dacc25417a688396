// Family moe_route: router logits to experts and their weights.
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
// Pinned ids must be experts; others throw PlanError.
void launch(const Config& config, const MoeRouteDesc& desc, const MoeRouteArgs& args, CpuContext& context);
void launch(const Config& config, const MoeRouteDesc& desc, const MoeRouteArgs& args, CudaStream& stream);

}  // namespace dyno::ops
