// Family matmul_id: one product per token and chosen expert.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> matmul_id_variants();
std::string op_key(const MatmulIdDesc& desc);
std::vector<Config> candidates(const MatmulIdDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MatmulIdDesc& desc, const DeviceInfo& device);
Support supports(const MatmulIdDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MatmulIdDesc& desc);
size_t scratch_bytes(const MatmulIdDesc& desc, const Config& config);
void launch(const Config& config, const MatmulIdDesc& desc, const MatmulIdArgs& args, CpuContext& context);
void launch(const Config& config, const MatmulIdDesc& desc, const MatmulIdArgs& args, CudaStream& stream);

}  // namespace dyno::ops
