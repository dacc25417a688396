#include "ops/moe_route/moe_route.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/moe_route/kernels.h"
#include "ops/moe_route/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY moe_route
#define DYNO_FAMILY_DESC MoeRouteDesc
#define DYNO_FAMILY_VARIANTS "ops/moe_route/variants.def"
#include "ops/family_table.inc"

Support supports(const MoeRouteDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m},
                                     {"experts", desc.experts},
                                     {"used", desc.used},
                                     {"groups", desc.groups},
                                     {"groups_used", desc.groups_used}});
  if (!sizes) return sizes;
  if (desc.experts % desc.groups != 0) {
    return Support::no(str_cat("experts=", desc.experts, " are not divisible into groups=", desc.groups));
  }
  if (desc.groups_used > desc.groups) {
    return Support::no(str_cat("groups_used=", desc.groups_used, " is more than groups=", desc.groups));
  }
  const int64_t open = desc.experts / desc.groups * desc.groups_used;
  if (desc.used > open) {
    return Support::no(str_cat("used=", desc.used, " is more than the ", open, " experts to choose from"));
  }
  if (device.kind == DeviceKind::cuda && desc.experts > kCudaMaxExperts) {
    return Support::no(str_cat("experts=", desc.experts, " are more than the ", kCudaMaxExperts, " of a CUDA warp"));
  }
  return check_config(Family::moe_route, kVariants, kInstances, config, device);
}

Config default_config(const MoeRouteDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) return warp_params{.warps = static_cast<int16_t>(desc.m <= 128 ? 1 : 4)};
  return rows_params{.grain = 1};
}

Cost cost(const MoeRouteDesc& desc) {
  const double m = static_cast<double>(desc.m), experts = static_cast<double>(desc.experts);
  return {m * (experts + 2 * static_cast<double>(desc.used)) * 4, m * experts * (8 + static_cast<double>(desc.used))};
}

size_t scratch_bytes(const MoeRouteDesc& desc, const Config& config) {
  if (config.variant == k_warp) return 0;
  return static_cast<size_t>(2 * desc.experts + desc.groups) * sizeof(float);
}

void launch(const Config& config, const MoeRouteDesc& desc, const MoeRouteArgs& args, CpuContext& context) {
  if (args.pinned != nullptr) {
    for (int64_t i = 0; i < desc.m * desc.used; ++i) {
      DYNO_CHECK(PlanError, args.pinned[i] >= 0 && args.pinned[i] < desc.experts, "[moe_route] pinned expert ",
                 args.pinned[i], " of token ", i / desc.used, " is not in 0..", desc.experts - 1);
    }
  }
  const MoeRouteShape shape{desc.experts,  desc.used, desc.groups, desc.groups_used, static_cast<int>(desc.gating),
                            desc.normalize};
  parallel_ranges(context, desc.m, desc.experts * desc.used, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte* scratch) {
                    DYNO_DISPATCH_ISA(context.isa,
                                      moe_route_tokens(args, shape, begin, end, reinterpret_cast<float*>(scratch)));
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MoeRouteDesc& desc, const MoeRouteArgs& args, CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::experts)) {
    throw_left_out(KernelGroup::experts);
  } else {
    moe_route_warps_cuda(args, desc, warp_params::of(config).warps, stream);
  }
}
#endif

}  // namespace dyno::ops
