// Family sample: draws one token per row of logits.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/op.h"

namespace dyno::ops {

std::span<const VariantInfo> sample_variants();
std::string op_key(const SampleDesc& desc);
std::vector<Config> candidates(const SampleDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const SampleDesc& desc, const DeviceInfo& device);
Support supports(const SampleDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const SampleDesc& desc);
size_t scratch_bytes(const SampleDesc& desc, const Config& config);
// Filters in the order top-k, top-p, min-p, then temperature; see sample.cpp.
void launch(const Config& config, const SampleDesc& desc, const SampleArgs& args, CpuContext& context);

}  // namespace dyno::ops
