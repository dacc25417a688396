#include "ops/sigmoid_gate/sigmoid_gate.h"

#include <cmath>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY sigmoid_gate
#define DYNO_FAMILY_DESC SigmoidGateDesc
#define DYNO_FAMILY_VARIANTS "ops/sigmoid_gate/variants.def"
#include "ops/family_table.inc"

Support supports(const SigmoidGateDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"n", desc.n}, {"gates", desc.gates}});
  if (!sizes) return sizes;
  if (desc.n % desc.gates != 0) {
    return Support::no(str_cat("n=", desc.n, " is not a multiple of gates=", desc.gates));
  }
  return check_config(Family::sigmoid_gate, kVariants, kInstances, config, device);
}

Config default_config(const SigmoidGateDesc&, const DeviceInfo& device) {
  return device.kind == DeviceKind::cuda ? Config(columns_params{.threads = 128}) : rows_params{.grain = 4};
}

Cost cost(const SigmoidGateDesc& desc) {
  const auto m = static_cast<double>(desc.m), n = static_cast<double>(desc.n);
  const auto gates = static_cast<double>(desc.gates);
  return {m * (8 * n + 4 * gates), m * (n + 4 * gates)};
}

size_t scratch_bytes(const SigmoidGateDesc&, const Config&) { return 0; }

void launch(const Config& config, const SigmoidGateDesc& desc, const SigmoidGateArgs& args, CpuContext& context) {
  const int64_t width = desc.n / desc.gates;
  parallel_ranges(context, desc.m, desc.n, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    for (int64_t row = begin; row < end; ++row) {
                      const float* x = args.x + row * args.x_stride;
                      const float* gate = args.gate + row * args.gate_stride;
                      float* y = args.y + row * args.y_stride;
                      for (int64_t g = 0; g < desc.gates; ++g) {
                        const float factor = 1.0f / (1.0f + std::exp(-gate[g]));
                        for (int64_t i = g * width; i < (g + 1) * width; ++i) y[i] = x[i] * factor;
                      }
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const SigmoidGateDesc& desc, const SigmoidGateArgs& args, CudaStream& stream) {
  sigmoid_gate_columns_cuda(args, desc, columns_params::of(config).threads, stream);
}
#endif

}  // namespace dyno::ops
