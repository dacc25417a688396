#include "ops/kv_store/kv_store.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/kv_store/kernels.h"
#include "ops/kv_store/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/runs.h"

namespace dyno::ops {

#define DYNO_FAMILY kv_store
#define DYNO_FAMILY_DESC KvStoreDesc
#define DYNO_FAMILY_VARIANTS "ops/kv_store/variants.def"
#include "ops/family_table.inc"

void store_cache_row(CpuIsa isa, DType type, const float* x, std::byte* out, int64_t width) {
  switch (type) {
    case DType::f32:
      DYNO_DISPATCH_ISA(isa, store_row_f32(x, out, width));
      break;
    case DType::f16:
      DYNO_DISPATCH_ISA(isa, store_row_f16(x, out, width));
      break;
    case DType::bf16:
      DYNO_DISPATCH_ISA(isa, store_row_bf16(x, out, width));
      break;
    case DType::q8_0:
      DYNO_DISPATCH_ISA(isa, store_row_q8_0(x, out, width));
      break;
    default:
      throw UnsupportedError(str_cat("[kv_store] no cache of type ", dtype_name(type)));
  }
}

Support supports(const KvStoreDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"width", desc.width}});
  if (!sizes) return sizes;
  if (!is_float(desc.type) && desc.type != DType::q8_0) {
    return Support::no(
        str_cat("type=", dtype_name(desc.type), " is not a KV cache type; expected f32, f16, bf16 or q8_0"));
  }
  if (desc.width % dtype_info(desc.type).block_elements != 0) {
    return Support::no(str_cat("width=", desc.width, " is not a multiple of the 32 elements in a block of q8_0"));
  }
  if (Support s = check_config(Family::kv_store, kVariants, kInstances, config, device); !s) return s;
  if (config.variant == k_chunks && (!is_float(desc.type) || desc.width % 8 != 0)) {
    return Support::no(
        str_cat("chunks copy 8 values of a float type; a row has ", desc.width, " of ", dtype_name(desc.type)));
  }
  return Support::yes();
}

Config default_config(const KvStoreDesc& desc, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda) return rows_params{.grain = 16};
  const Config chunks = chunks_params{.threads = 128};
  return desc.m >= 64 && supports(desc, chunks, device) ? chunks : columns_params{.threads = 128};
}

Cost cost(const KvStoreDesc& desc) {
  const double m = static_cast<double>(desc.m);
  return {m * (static_cast<double>(desc.width) * 4 + static_cast<double>(row_bytes(desc.type, desc.width))),
          m * static_cast<double>(desc.width)};
}

size_t scratch_bytes(const KvStoreDesc&, const Config&) { return 0; }

void launch(const Config& config, const KvStoreDesc& desc, const KvStoreArgs& args, CpuContext& context) {
  check_runs("kv_store", args.runs, args.n_runs, desc.m, args.slot_positions);
  parallel_ranges(context, desc.m, desc.width, rows_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte*) {
                    for (int32_t r = 0; r < args.n_runs; ++r) {
                      const SequenceRun& run = args.runs[r];
                      const int64_t first = std::max<int64_t>(begin, run.first_token);
                      const int64_t last = std::min<int64_t>(end, int64_t{run.first_token} + run.n_tokens);
                      for (int64_t token = first; token < last; ++token) {
                        const int64_t cell = run.slot * args.slot_positions + run.position + (token - run.first_token);
                        store_cache_row(context.isa, desc.type, args.x + token * args.x_stride,
                                        args.cache + cell * args.row_bytes + args.byte_offset, desc.width);
                      }
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const KvStoreDesc& desc, const KvStoreArgs& args, CudaStream& stream) {
  if (config.variant == k_chunks) {
    kv_store_chunks_cuda(args, desc, chunks_params::of(config).threads, stream);
  } else {
    kv_store_rows_cuda(args, desc, columns_params::of(config).threads, stream);
  }
}
#endif

}  // namespace dyno::ops
