// Family copy: converts rows of f32 activations to the type that products with weights read.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> copy_variants();
std::string op_key(const CopyDesc& desc);
std::vector<Config> candidates(const CopyDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const CopyDesc& desc, const DeviceInfo& device);
Support supports(const CopyDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const CopyDesc& desc);
size_t scratch_bytes(const CopyDesc& desc, const Config& config);
void launch(const Config& config, const CopyDesc& desc, const CopyArgs& args, CpuContext& context);
void launch(const Config& config, const CopyDesc& desc, const CopyArgs& args, CudaStream& stream);

}  // namespace dyno::ops
