// Family transfer: copies a value from the memory of one device to another.
#pragma once

#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// y = x: `fixed` bytes and m rows of `row` bytes, contiguous. The launch belongs to the device of y. On a GPU, one of
// the two may be in host memory.
struct TransferDesc {
  int64_t m = 1, row = 0, fixed = 0;
  friend bool operator==(const TransferDesc&, const TransferDesc&) = default;
  int64_t bytes() const { return m * row + fixed; }
};

struct TransferArgs {
  const void* x = nullptr;
  void* y = nullptr;
};

std::span<const VariantInfo> transfer_variants();
std::string op_key(const TransferDesc& desc);
std::vector<Config> candidates(const TransferDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const TransferDesc& desc, const DeviceInfo& device);
Support supports(const TransferDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const TransferDesc& desc);
size_t scratch_bytes(const TransferDesc& desc, const Config& config);
void launch(const Config& config, const TransferDesc& desc, const TransferArgs& args, CpuContext& context);
void launch(const Config& config, const TransferDesc& desc, const TransferArgs& args, CudaStream& stream);

// transfer.cu
void transfer_cuda(const TransferArgs& args, const TransferDesc& desc, CudaStream& stream);

}  // namespace dyno::ops
