// Family norm: RMS norm or layer norm over rows, with an optional weight and residual.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> norm_variants();
std::string op_key(const NormDesc& desc);
std::vector<Config> candidates(const NormDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const NormDesc& desc, const DeviceInfo& device);
Support supports(const NormDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const NormDesc& desc);
size_t scratch_bytes(const NormDesc& desc, const Config& config);
// `out` may be `x`.
void launch(const Config& config, const NormDesc& desc, const NormArgs& args, CpuContext& context);
void launch(const Config& config, const NormDesc& desc, const NormArgs& args, CudaStream& stream);

}  // namespace dyno::ops
