// Family moe_split: divides the chosen experts of tokens between two devices; each multiplies its own.
#pragma once

#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// For each of the ids [m, used]: `here` is the place of the expert on this device, or -1 if it has none; `there` is the
// expert if it has no place here, otherwise -1.
struct MoeSplitDesc {
  int64_t m = 1, experts = 0, used = 1;
  friend bool operator==(const MoeSplitDesc&, const MoeSplitDesc&) = default;
};

struct MoeSplitArgs {
  const int32_t* ids = nullptr;     // [m, used]
  const int32_t* places = nullptr;  // [experts]; -1: not here
  int32_t* here = nullptr;          // [m, used]
  int32_t* there = nullptr;         // [m, used]
  int32_t* counts = nullptr;        // [experts]: incremented for each choice; null: not counted
};

std::span<const VariantInfo> moe_split_variants();
std::string op_key(const MoeSplitDesc& desc);
std::vector<Config> candidates(const MoeSplitDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const MoeSplitDesc& desc, const DeviceInfo& device);
Support supports(const MoeSplitDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const MoeSplitDesc& desc);
size_t scratch_bytes(const MoeSplitDesc& desc, const Config& config);
// Throws PlanError for an id outside [0, experts).
void launch(const Config& config, const MoeSplitDesc& desc, const MoeSplitArgs& args, CpuContext& context);
void launch(const Config& config, const MoeSplitDesc& desc, const MoeSplitArgs& args, CudaStream& stream);

// moe_split_ids.cu
void moe_split_ids_cuda(const MoeSplitArgs& args, const MoeSplitDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
