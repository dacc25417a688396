// Family short_conv: a causal convolution of few taps over the tokens of each sequence, channel by channel.
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// y_t[c] = f(bias[c] + sum over j < taps of w[c, j] * u_(t - taps + 1 + j)[c]). u is x, or before * x with `gated`; f
// is the identity, or SiLU with `silu`. With `gated`, y is multiplied by `after`. The taps - 1 inputs before a run come
// from the state of its sequence; they are zeros if the run starts at position 0. The run writes its own last inputs to
// the state.
struct ShortConvDesc {
  int64_t m = 1, n = 0, taps = 0;
  bool silu = false;
  bool gated = false;
  friend bool operator==(const ShortConvDesc&, const ShortConvDesc&) = default;
  int64_t state_elements() const { return (taps - 1) * n; }  // per sequence
};

inline constexpr int64_t kMaxTaps = 8;

std::span<const VariantInfo> short_conv_variants();
std::string op_key(const ShortConvDesc& desc);
std::vector<Config> candidates(const ShortConvDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const ShortConvDesc& desc, const DeviceInfo& device);
Support supports(const ShortConvDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const ShortConvDesc& desc);
size_t scratch_bytes(const ShortConvDesc& desc, const Config& config);
void launch(const Config& config, const ShortConvDesc& desc, const ShortConvArgs& args, CpuContext& context);
void launch(const Config& config, const ShortConvDesc& desc, const ShortConvArgs& args, CudaStream& stream);

// conv_threads.cu
void short_conv_cuda(const ShortConvArgs& args, const ShortConvDesc& desc, int threads, CudaStream& stream);

}  // namespace dyno::ops
