// Family norm_route: RMS norm, router product and choice of experts.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> norm_route_variants();
std::string op_key(const NormRouteDesc& desc);
std::vector<Config> candidates(const NormRouteDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const NormRouteDesc& desc, const DeviceInfo& device);
Support supports(const NormRouteDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const NormRouteDesc& desc);
size_t scratch_bytes(const NormRouteDesc& desc, const Config& config);
// Throws PlanError for a pinned expert that does not exist (CPU; on a GPU the caller checks).
void launch(const Config& config, const NormRouteDesc& desc, const NormRouteArgs& args, CpuContext& context);
void launch(const Config& config, const NormRouteDesc& desc, const NormRouteArgs& args, CudaStream& stream);

}  // namespace dyno::ops
