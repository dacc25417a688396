// Family matmul: tokens times the transpose of a weight matrix, for any number of tokens; the matrix-vector product is
// a variant.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/neighbours.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> matmul_variants();
std::string op_key(const MatmulDesc& desc);
std::vector<Config> candidates(const MatmulDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MatmulDesc& desc, const DeviceInfo& device, const Neighbours& neighbours);
inline Config default_config(const MatmulDesc& desc, const DeviceInfo& device) {
  return default_config(desc, device, Neighbours{});
}
Support supports(const MatmulDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MatmulDesc& desc);
size_t scratch_bytes(const MatmulDesc& desc, const Config& config);
void launch(const Config& config, const MatmulDesc& desc, const MatmulArgs& args, CpuContext& context);
void launch(const Config& config, const MatmulDesc& desc, const MatmulArgs& args, CudaStream& stream);

}  // namespace dyno::ops
