// Family sigmoid_gate: scales rows by the sigmoid of gates.
#pragma once

#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// y[m, n] = x * sigmoid(gate[m, gates]): each gate scales n / gates adjacent elements. The gate of attention's output
// has one value per element; the gate of a shared expert has one per row.
struct SigmoidGateDesc {
  int64_t m = 1, n = 0, gates = 0;
  friend bool operator==(const SigmoidGateDesc&, const SigmoidGateDesc&) = default;
};

struct SigmoidGateArgs {
  const float* x = nullptr;
  int64_t x_stride = 0;  // between tokens, as the next ones
  const float* gate = nullptr;
  int64_t gate_stride = 0;
  float* y = nullptr;  // may be x
  int64_t y_stride = 0;
};

std::span<const VariantInfo> sigmoid_gate_variants();
std::string op_key(const SigmoidGateDesc& desc);
std::vector<Config> candidates(const SigmoidGateDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const SigmoidGateDesc& desc, const DeviceInfo& device);
Support supports(const SigmoidGateDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const SigmoidGateDesc& desc);
size_t scratch_bytes(const SigmoidGateDesc& desc, const Config& config);
void launch(const Config& config, const SigmoidGateDesc& desc, const SigmoidGateArgs& args, CpuContext& context);
void launch(const Config& config, const SigmoidGateDesc& desc, const SigmoidGateArgs& args, CudaStream& stream);

// sigmoid_gate_columns.cu
void sigmoid_gate_columns_cuda(const SigmoidGateArgs& args, const SigmoidGateDesc& desc, int threads,
                               CudaStream& stream);

}  // namespace dyno::ops
