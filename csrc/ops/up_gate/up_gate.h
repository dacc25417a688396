// Family up_gate: activation(x * gate) * (x * up), two products and the gated activation in one launch.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> up_gate_variants();
std::string op_key(const UpGateDesc& desc);
std::vector<Config> candidates(const UpGateDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const UpGateDesc& desc, const DeviceInfo& device);
Support supports(const UpGateDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const UpGateDesc& desc);
size_t scratch_bytes(const UpGateDesc& desc, const Config& config);
void launch(const Config& config, const UpGateDesc& desc, const UpGateArgs& args, CpuContext& context);
void launch(const Config& config, const UpGateDesc& desc, const UpGateArgs& args, CudaStream& stream);

}  // namespace dyno::ops
