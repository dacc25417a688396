// Family glu: activation(gate) * up, for projections that no fused launch can read, because their types differ or
// because their weights have separate factors (NVFP4).
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> glu_variants();
std::string op_key(const GluDesc& desc);
std::vector<Config> candidates(const GluDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const GluDesc& desc, const DeviceInfo& device);
Support supports(const GluDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const GluDesc& desc);
size_t scratch_bytes(const GluDesc& desc, const Config& config);
// `y` may be `up` or `gate`.
void launch(const Config& config, const GluDesc& desc, const GluArgs& args, CpuContext& context);
void launch(const Config& config, const GluDesc& desc, const GluArgs& args, CudaStream& stream);

}  // namespace dyno::ops
