#include "ops/glu/glu.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/glu/kernels_cuda.h"
#include "ops/matmul/kernels.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY glu
#define DYNO_FAMILY_DESC GluDesc
#define DYNO_FAMILY_VARIANTS "ops/glu/variants.def"
#include "ops/family_table.inc"

Support supports(const GluDesc& desc, const Config& config, const DeviceInfo& device) {
  Support sizes = check_sizes({{"m", desc.m}, {"n", desc.n}, {"used", desc.used}});
  if (sizes && (desc.experts < 0 || desc.n % desc.used != 0)) {
    sizes = Support::no(str_cat(desc.n, " columns of ", desc.used, " slots, ", desc.experts, " experts"));
  }
  return sizes ? check_config(Family::glu, kVariants, kInstances, config, device) : sizes;
}

Config default_config(const GluDesc&, const DeviceInfo& device) {
  return device.kind == DeviceKind::cuda ? Config(columns_params{.threads = 128}) : rows_params{.grain = 4};
}

Cost cost(const GluDesc& desc) {
  const double elements = static_cast<double>(desc.m) * static_cast<double>(desc.n);
  return {elements * 12, elements * 8};
}

size_t scratch_bytes(const GluDesc&, const Config&) { return 0; }

void launch(const Config& config, const GluDesc& desc, const GluArgs& args, CpuContext& context) {
  const int64_t slots = desc.experts > 0 ? desc.used : 1, width = desc.n / slots;
  parallel_ranges(context, desc.m, desc.n, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    for (int64_t row = begin; row < end; ++row) {
                      for (int64_t slot = 0; slot < slots; ++slot) {
                        float* y = args.y + row * args.y_stride + slot * width;
                        GateEpilogue job;
                        job.gate = args.gate + row * args.gate_stride + slot * width;
                        job.up = args.up + row * args.up_stride + slot * width;
                        job.m = 1;
                        job.columns = static_cast<int>(width);
                        job.activation = desc.activation;
                        if (desc.experts > 0) {
                          const int32_t expert = args.ids[row * slots + slot];
                          if (args.gate_scale != nullptr) job.scale_gate = args.gate_scale[expert];
                          if (args.up_scale != nullptr) job.scale_up = args.up_scale[expert];
                        }
                        job.y = &y;
                        DYNO_DISPATCH_ISA(context.isa, epilogue_gate(job));
                      }
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const GluDesc& desc, const GluArgs& args, CudaStream& stream) {
  glu_columns_cuda(args, desc, columns_params::of(config).threads, stream);
}
#endif

}  // namespace dyno::ops
