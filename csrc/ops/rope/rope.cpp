#include "ops/rope/rope.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/rope/kernels.h"
#include "ops/rope/kernels_cuda.h"

namespace dyno::ops {

#define DYNO_FAMILY rope
#define DYNO_FAMILY_DESC RopeDesc
#define DYNO_FAMILY_VARIANTS "ops/rope/variants.def"
#include "ops/family_table.inc"

Support supports(const RopeDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"heads", desc.heads}, {"head_dim", desc.head_dim}});
  if (!sizes) return sizes;
  if (desc.n_rot < 2 || desc.n_rot % 2 != 0) {
    return Support::no(str_cat("n_rot=", desc.n_rot, " is not a positive even number"));
  }
  if (desc.offset < 0 || desc.offset + desc.n_rot > desc.head_dim) {
    return Support::no(str_cat("n_rot=", desc.n_rot, " dimensions from offset=", desc.offset,
                               " do not fit into head_dim=", desc.head_dim));
  }
  return check_config(Family::rope, kVariants, kInstances, config, device);
}

Config default_config(const RopeDesc& desc, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda) return rows_params{.grain = 4};
  return desc.m >= 64 ? Config(tokens_params{.threads = 256}) : pairs_params{.threads = 128};
}

Cost cost(const RopeDesc& desc) {
  const double elements = static_cast<double>(desc.m) * static_cast<double>(desc.heads * desc.n_rot);
  return {elements * 8, elements * 3};
}

size_t scratch_bytes(const RopeDesc& desc, const Config& config) {
  return config.variant != k_rows ? 0 : static_cast<size_t>(desc.n_rot) * sizeof(float);
}

void launch(const Config& config, const RopeDesc& desc, const RopeArgs& args, CpuContext& context) {
  DYNO_CHECK(PlanError, args.position_step > 0, "[rope] position_step is ", args.position_step,
             "; expected a positive number");
  for (int64_t token = 0; token < desc.m; ++token) {
    DYNO_CHECK(PlanError, args.positions[token] >= 0, "[rope] token ", token, " has position ", args.positions[token]);
  }
  parallel_ranges(context, desc.m, desc.heads * desc.n_rot, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte* scratch) {
                    DYNO_DISPATCH_ISA(context.isa,
                                      rope_tokens(args, desc.heads, desc.head_dim, desc.n_rot, desc.offset, desc.neox,
                                                  begin, end, reinterpret_cast<float*>(scratch)));
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const RopeDesc& desc, const RopeArgs& args, CudaStream& stream) {
  if (config.variant == k_tokens) {
    rope_tokens_cuda(args, desc, tokens_params::of(config).threads, stream);
  } else {
    rope_pairs_cuda(args, desc, pairs_params::of(config).threads, stream);
  }
}
#endif

}  // namespace dyno::ops
