#include "ops/transfer/transfer.h"

#include <cstring>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY transfer
#define DYNO_FAMILY_DESC TransferDesc
#define DYNO_FAMILY_VARIANTS "ops/transfer/variants.def"
#include "ops/family_table.inc"

Support supports(const TransferDesc& desc, const Config& config, const DeviceInfo& device) {
  if (desc.row < 0 || desc.fixed < 0) {
    return Support::no(str_cat("row=", desc.row, " fixed=", desc.fixed, ": a size is below 0"));
  }
  const Support sizes = check_sizes({{"m", desc.m}, {"bytes", desc.bytes()}});
  return sizes ? check_config(Family::transfer, kVariants, kInstances, config, device) : sizes;
}

Config default_config(const TransferDesc&, const DeviceInfo& device) {
  return device.kind == DeviceKind::cuda ? Config(driver_params{}) : bytes_params{.grain = 256};
}

Cost cost(const TransferDesc& desc) { return {static_cast<double>(desc.bytes()) * 2, 0}; }

size_t scratch_bytes(const TransferDesc&, const Config&) { return 0; }

void launch(const Config& config, const TransferDesc& desc, const TransferArgs& args, CpuContext& context) {
  // Each thread copies whole cache lines.
  constexpr int64_t kLine = 64;
  const int64_t bytes = desc.bytes();
  parallel_ranges(context, (bytes + kLine - 1) / kLine, kLine, bytes_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    const int64_t first = begin * kLine, last = std::min(end * kLine, bytes);
                    std::memcpy(static_cast<std::byte*>(args.y) + first, static_cast<const std::byte*>(args.x) + first,
                                static_cast<size_t>(last - first));
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config&, const TransferDesc& desc, const TransferArgs& args, CudaStream& stream) {
  transfer_cuda(args, desc, stream);
}
#endif

}  // namespace dyno::ops
