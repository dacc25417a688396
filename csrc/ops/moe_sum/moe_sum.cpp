#include "ops/moe_sum/moe_sum.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/moe_sum/kernels.h"
#include "ops/moe_sum/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY moe_sum
#define DYNO_FAMILY_DESC MoeSumDesc
#define DYNO_FAMILY_VARIANTS "ops/moe_sum/variants.def"
#include "ops/family_table.inc"

Support supports(const MoeSumDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"n", desc.n}, {"used", desc.used}});
  return sizes ? check_config(Family::moe_sum, kVariants, kInstances, config, device) : sizes;
}

Config default_config(const MoeSumDesc&, const DeviceInfo& device) {
  return device.kind == DeviceKind::cuda ? Config(columns_params{.threads = 64}) : rows_params{.grain = 16};
}

Cost cost(const MoeSumDesc& desc) {
  const double outputs = static_cast<double>(desc.m) * static_cast<double>(desc.n);
  const double used = static_cast<double>(desc.used);
  return {outputs * 4 * (used + 2), outputs * 2 * (used + 1)};
}

size_t scratch_bytes(const MoeSumDesc&, const Config&) { return 0; }

void launch(const Config& config, const MoeSumDesc& desc, const MoeSumArgs& args, CpuContext& context) {
  const int64_t pieces = (desc.n + kMoeSumPiece - 1) / kMoeSumPiece;
  const int64_t elements = std::min(desc.n, kMoeSumPiece) * desc.used;
  parallel_ranges(context, desc.m * pieces, elements, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    DYNO_DISPATCH_ISA(context.isa, moe_sum_pieces(args, desc.n, desc.used, pieces, begin, end));
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MoeSumDesc& desc, const MoeSumArgs& args, CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::experts)) {
    throw_left_out(KernelGroup::experts);
  } else {
    moe_sum_columns_cuda(args, desc, columns_params::of(config).threads, stream);
  }
}
#endif

}  // namespace dyno::ops
