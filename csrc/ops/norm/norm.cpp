#include "ops/norm/norm.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/norm/kernels.h"
#include "ops/norm/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY norm
#define DYNO_FAMILY_DESC NormDesc
#define DYNO_FAMILY_VARIANTS "ops/norm/variants.def"
#include "ops/family_table.inc"

Support supports(const NormDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"n", desc.n}, {"rows_per_token", desc.rows_per_token}});
  if (!sizes) return sizes;
  return check_config(Family::norm, kVariants, kInstances, config, device);
}

Config default_config(const NormDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    // A warp for each head's norm; blocks for whole rows, wider when there are few of them.
    if (desc.n <= 512) return block_params{.threads = 32};
    return block_params{.threads = static_cast<int16_t>(desc.n >= 2048 && desc.m <= 64 ? 1024 : 256)};
  }
  return rows_params{.grain = 16};
}

Cost cost(const NormDesc& desc) {
  const double elements = static_cast<double>(desc.m) * static_cast<double>(desc.rows_per_token * desc.n);
  const double bytes = elements * 4 * (desc.add ? 3 : 2) + static_cast<double>(desc.n) * (desc.centred ? 8 : 4);
  return {bytes, elements * ((desc.add ? 5 : 4) + (desc.centred ? 3 : 0))};
}

size_t scratch_bytes(const NormDesc&, const Config&) { return 0; }

void launch(const Config& config, const NormDesc& desc, const NormArgs& args, CpuContext& context) {
  NormArgs given = args;
  if (!desc.add) given.residual = nullptr;
  if (!desc.centred) given.bias = nullptr;
  parallel_ranges(context, desc.m * desc.rows_per_token, desc.n, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    if (desc.centred) {
                      DYNO_DISPATCH_ISA(context.isa, layer_norm_rows(given, desc.n, desc.rows_per_token, begin, end));
                    } else {
                      DYNO_DISPATCH_ISA(context.isa, norm_rows(given, desc.n, desc.rows_per_token, begin, end));
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const NormDesc& desc, const NormArgs& args, CudaStream& stream) {
  NormArgs given = args;
  if (!desc.add) given.residual = nullptr;
  norm_rows_cuda(given, desc, block_params::of(config).threads, stream);
}
#endif

}  // namespace dyno::ops
