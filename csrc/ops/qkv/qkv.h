// Family qkv: up to three products of the same rows in one launch. On the CPU these are three ops.
#pragma once

#include "ops/args.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> qkv_variants();
std::string op_key(const QkvDesc& desc);
std::vector<Config> candidates(const QkvDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const QkvDesc& desc, const DeviceInfo& device);
Support supports(const QkvDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const QkvDesc& desc);
size_t scratch_bytes(const QkvDesc& desc, const Config& config);
void launch(const Config& config, const QkvDesc& desc, const QkvArgs& args, CudaStream& stream);

}  // namespace dyno::ops
