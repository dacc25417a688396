#include "ops/copy/copy.h"

#include <cstring>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/copy/act_q8.h"
#include "ops/copy/kernels.h"
#include "ops/copy/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY copy
#define DYNO_FAMILY_DESC CopyDesc
#define DYNO_FAMILY_VARIANTS "ops/copy/variants.def"
#include "ops/family_table.inc"

Support supports(const CopyDesc& desc, const Config& config, const DeviceInfo& device) {
  if (Support s = check_sizes({{"m", desc.m}, {"k", desc.k}}); !s) return s;
  if (desc.act == ActType::q8 && desc.k % kActBlock != 0) {
    return Support::no(str_cat("k=", desc.k, " is not a multiple of ", kActBlock, ", the block of q8 activations"));
  }
  const Support checked = check_config(Family::copy, kVariants, kInstances, config, device);
  if (checked && config.variant == k_columns && desc.act != ActType::f32) {
    return Support::no(str_cat("variant columns moves f32 and cannot convert to ", act_name(desc.act)));
  }
  return checked;
}

Config default_config(const CopyDesc&, const DeviceInfo& device) {
  return device.kind == DeviceKind::cuda ? Config(columns_params{.threads = 64}) : rows_params{.grain = 8};
}

Cost cost(const CopyDesc& desc) {
  const double elements = static_cast<double>(desc.m) * static_cast<double>(desc.k);
  return {elements * (desc.act == ActType::q8 ? 5.25 : 8), elements * (desc.act == ActType::q8 ? 3 : 0)};
}

size_t scratch_bytes(const CopyDesc&, const Config&) { return 0; }

void launch(const Config& config, const CopyDesc& desc, const CopyArgs& args, CpuContext& context) {
  parallel_ranges(context, desc.m, desc.k, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    if (desc.act == ActType::q8) {
                      DYNO_DISPATCH_ISA(context.isa, quantize_rows_q8(args, desc.k, begin, end));
                      return;
                    }
                    for (int64_t row = begin; row < end; ++row) {
                      std::memcpy(static_cast<std::byte*>(args.out) + row * args.out_stride_bytes,
                                  args.x + row * args.x_stride, static_cast<size_t>(desc.k) * sizeof(float));
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const CopyDesc& desc, const CopyArgs& args, CudaStream& stream) {
  copy_columns_cuda(args, desc, columns_params::of(config).threads, stream);
}
#endif

}  // namespace dyno::ops
