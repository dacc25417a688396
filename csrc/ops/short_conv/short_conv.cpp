#include "ops/short_conv/short_conv.h"

#include "ops/contract.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/runs.h"
#include "ops/short_conv/kernels.h"

namespace dyno::ops {

#define DYNO_FAMILY short_conv
#define DYNO_FAMILY_DESC ShortConvDesc
#define DYNO_FAMILY_VARIANTS "ops/short_conv/variants.def"
#include "ops/family_table.inc"

namespace {

constexpr int64_t kUnit = 16;  // channels that one thread processes together: the widest vector

}  // namespace

Support supports(const ShortConvDesc& desc, const Config& config, const DeviceInfo& device) {
  if (const Support sizes = check_sizes({{"m", desc.m}, {"n", desc.n}}); !sizes) return sizes;
  if (desc.taps < 2 || desc.taps > kMaxTaps) {
    return Support::no(str_cat("taps=", desc.taps, "; kernels have 2 to ", kMaxTaps));
  }
  return check_config(Family::short_conv, kVariants, kInstances, config, device);
}

Config default_config(const ShortConvDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) return columns_params{.threads = 64};
  return channels_params{.channels = static_cast<int16_t>(desc.m <= 4 ? 64 : 4)};
}

Cost cost(const ShortConvDesc& desc) {
  const auto m = static_cast<double>(desc.m), n = static_cast<double>(desc.n), taps = static_cast<double>(desc.taps);
  return {4 * n * (m * (desc.gated ? 4 : 2) + 3 * taps - 2), m * n * (2 * taps + (desc.silu ? 4 : 0))};
}

size_t scratch_bytes(const ShortConvDesc&, const Config&) { return 0; }

void launch(const Config& config, const ShortConvDesc& desc, const ShortConvArgs& args, CpuContext& context) {
  check_runs("short_conv", args.runs, args.n_runs, desc.m, args.slot_positions);
  const ShortConvShape shape{desc.n, desc.taps, desc.silu, desc.gated};
  const int64_t units = (desc.n + kUnit - 1) / kUnit;
  parallel_ranges(context, units, 1, channels_params::of(config).channels, [&](int64_t begin, int64_t end, std::byte*) {
    DYNO_DISPATCH_ISA(context.isa, conv_channels(args, shape, begin * kUnit, std::min(end * kUnit, desc.n)));
  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const ShortConvDesc& desc, const ShortConvArgs& args, CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::short_conv)) {
    throw_left_out(KernelGroup::short_conv);
  } else {
    short_conv_cuda(args, desc, columns_params::of(config).threads, stream);
  }
}
#endif

}  // namespace dyno::ops
