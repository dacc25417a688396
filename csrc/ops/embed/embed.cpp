#include "ops/embed/embed.h"

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/contract.h"
#include "ops/embed/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"
namespace dyno::ops {

#define DYNO_FAMILY embed
#define DYNO_FAMILY_DESC EmbedDesc
#define DYNO_FAMILY_VARIANTS "ops/embed/variants.def"
#include "ops/family_table.inc"

Support supports(const EmbedDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"n", desc.n}});
  if (!sizes) return sizes;
  if (!can_dequantize(desc.type)) return Support::no(str_cat("no dequantisation of ", dtype_name(desc.type)));
  if (desc.n % dtype_info(desc.type).block_elements != 0) {
    return Support::no(str_cat("n=", desc.n, " is not a multiple of the ", dtype_info(desc.type).block_elements,
                               " elements of a block of ", dtype_name(desc.type)));
  }
  return check_config(Family::embed, kVariants, kInstances, config, device);
}

Config default_config(const EmbedDesc&, const DeviceInfo& device) {
  return device.kind == DeviceKind::cuda ? Config(columns_params{.threads = 256}) : rows_params{.grain = 16};
}

Cost cost(const EmbedDesc& desc) {
  const double rows = static_cast<double>(desc.m), n = static_cast<double>(desc.n);
  return {rows * (static_cast<double>(row_bytes(desc.type, desc.n)) + n * 4), rows * n};
}

size_t scratch_bytes(const EmbedDesc&, const Config&) { return 0; }

void launch(const Config& config, const EmbedDesc& desc, const EmbedArgs& args, CpuContext& context) {
  for (int64_t token = 0; token < desc.m; ++token) {
    DYNO_CHECK(PlanError, args.ids[token] >= 0 && args.ids[token] < args.rows, "[embed] token ", token, " has id ",
               args.ids[token], "; the table has ", args.rows, " rows");
  }
  const size_t row = row_bytes(desc.type, desc.n);
  parallel_ranges(context, desc.m, desc.n, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    for (int64_t token = begin; token < end; ++token) {
                      float* out = args.out + token * desc.n;
                      const size_t at = static_cast<size_t>(args.ids[token]) * row;
                      dequantize_row(desc.type, static_cast<const std::byte*>(args.table) + at, out, desc.n);
                      if (args.scale == 1.0f) continue;
                      for (int64_t i = 0; i < desc.n; ++i) out[i] *= args.scale;
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const EmbedDesc& desc, const EmbedArgs& args, CudaStream& stream) {
  embed_columns_cuda(args, desc, columns_params::of(config).threads, stream);
}
#endif

}  // namespace dyno::ops
