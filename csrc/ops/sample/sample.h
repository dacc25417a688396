// Family sample: samples one token per row of logits.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"
#include "ops/sample/settings.h"

namespace dyno::ops {

std::span<const VariantInfo> sample_variants();
std::string op_key(const SampleDesc& desc);
std::vector<Config> candidates(const SampleDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const SampleDesc& desc, const DeviceInfo& device);
Support supports(const SampleDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const SampleDesc& desc);
size_t scratch_bytes(const SampleDesc& desc, const Config& config);
// Applies top-k, top-p, min-p, then temperature; see sample.cpp.
void launch(const Config& config, const SampleDesc& desc, const SampleArgs& args, CpuContext& context);
// `row_settings` is device memory: a captured launch uses the values at the time of its replay.
void launch(const Config& config, const SampleDesc& desc, const SampleArgs& args, CudaStream& stream);
// The same if no row of `row_settings` needs sorts_row(), with a fraction of the memory.
size_t unsorted_scratch_bytes(const SampleDesc& desc, const Config& config);
void launch_unsorted(const Config& config, const SampleDesc& desc, const SampleArgs& args, CudaStream& stream);
// Throws PlanError for an invalid value.
void check_settings(const SampleSettings& settings);

}  // namespace dyno::ops
