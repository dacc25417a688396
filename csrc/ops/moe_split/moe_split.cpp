#include "ops/moe_split/moe_split.h"

#include <atomic>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY moe_split
#define DYNO_FAMILY_DESC MoeSplitDesc
#define DYNO_FAMILY_VARIANTS "ops/moe_split/variants.def"
#include "ops/family_table.inc"

Support supports(const MoeSplitDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"experts", desc.experts}, {"used", desc.used}});
  return sizes ? check_config(Family::moe_split, kVariants, kInstances, config, device) : sizes;
}

Config default_config(const MoeSplitDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    return each_params{.threads = static_cast<int16_t>(desc.m * desc.used <= 64 ? 64 : 256)};
  }
  return ids_params{.grain = 16};
}

Cost cost(const MoeSplitDesc& desc) {
  const double ids = static_cast<double>(desc.m) * static_cast<double>(desc.used);
  return {(3 * ids + static_cast<double>(desc.experts)) * 4, ids};
}

size_t scratch_bytes(const MoeSplitDesc&, const Config&) { return 0; }

void launch(const Config& config, const MoeSplitDesc& desc, const MoeSplitArgs& args, CpuContext& context) {
  parallel_ranges(context, desc.m * desc.used, 1, ids_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    for (int64_t i = begin; i < end; ++i) {
                      const int32_t id = args.ids[i];
                      DYNO_CHECK(PlanError, id >= 0 && id < desc.experts, "[moe] token ", i / desc.used,
                                 " is routed to expert ", id, " of ", desc.experts);
                      const int32_t place = args.places[id];
                      args.here[i] = place >= 0 ? place : -1;
                      args.there[i] = place >= 0 ? -1 : id;
                      if (args.counts == nullptr) continue;
                      std::atomic_ref(args.counts[id]).fetch_add(1, std::memory_order_relaxed);
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MoeSplitDesc& desc, const MoeSplitArgs& args, CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::experts)) {
    throw_left_out(KernelGroup::experts);
  } else {
    moe_split_ids_cuda(args, desc, each_params::of(config).threads, stream);
  }
}
#endif

}  // namespace dyno::ops
