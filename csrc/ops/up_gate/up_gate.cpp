#include "ops/up_gate/up_gate.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/gate_pair.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY up_gate
#define DYNO_FAMILY_DESC UpGateDesc
#define DYNO_FAMILY_VARIANTS "ops/up_gate/variants.def"
#include "ops/family_table.inc"

namespace {

cuda::Choice choice_of(const Config& config) { return cuda::choice_of(kVariants, config); }

Tiling tiling_of(const Config& config) {
  if (config.variant == k_matvec) return matvec_tiling(matvec_params::of(config), 2);
  if (config.variant == k_dot) return dot_tiling(dot_params::of(config));
  if (config.variant == k_fused) return gemm_tiling(fused_params::of(config), true);
  return gemm_tiling(split_params::of(config), false);
}

Weights weights_of(const UpGateDesc& desc, const NumaCopies* copies = nullptr) {
  return {desc.type, desc.layout, desc.n, desc.k, copies};
}

}  // namespace

Support supports(const UpGateDesc& desc, const Config& config, const DeviceInfo& device) {
  if (Support s = check_sizes({{"m", desc.m}, {"n", desc.n}, {"k", desc.k}}); !s) return s;
  if (Support s = supports_weights(desc.type, desc.layout, desc.act, desc.k); !s) return s;
  if (desc.y_tiles < 0) return Support::no(str_cat("y_tiles=", desc.y_tiles, " is below 0"));
  if (Support s = check_config(Family::up_gate, kVariants, kInstances, config, device); !s) return s;
  if (device.kind == DeviceKind::cuda) return cuda::supports_choice(cuda::shape_of(desc), choice_of(config), device);
  if (desc.layout == Layout::gpu) return Support::no("layout gpu is read by CUDA kernels only");
  if (desc.norm) return Support::no("only CUDA kernels normalise the rows of a product");
  if (desc.path != ProductPath::any) return Support::no("only CUDA devices have paths");
  if (desc.y_tiles > 0) return Support::no("only CUDA kernels write f16 tiles");
  return supports_tiling(tiling_of(config), desc.type, desc.act, desc.m, device);
}

Config default_config(const UpGateDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    return cuda::config_of(kVariants, cuda::default_choice(cuda::shape_of(desc), device));
  }
  const bool wide = device.isa == CpuIsa::avx512_vnni;
  Config wanted;
  if (desc.act == ActType::f32) {
    wanted = wide ? dot_params{.rows = 4, .tokens = 6, .split = 1} : dot_params{.rows = 4, .tokens = 2, .split = 1};
  } else if (desc.m <= default_matvec_tokens(desc.type, desc.layout, device.isa)) {
    wanted = matvec_params{.rows = 128, .prefetch = 8192, .split = 1};
  } else {
    wanted = wide ? Config(fused_params{.rows = 64, .tokens = 3, .kc = 512, .block = 192, .split = 1})
                  : split_params{.rows = 16, .tokens = 3, .kc = 512, .block = 96, .split = 1};
  }
  return nearest_instance(kInstances, wanted, [&](const Config& c) { return supports(desc, c, device).ok; });
}

Cost cost(const UpGateDesc& desc) {
  const double m = static_cast<double>(desc.m), n = static_cast<double>(desc.n), k = static_cast<double>(desc.k);
  return {2 * static_cast<double>(layout_bytes(desc.type, desc.layout, desc.n, desc.k)) +
              m * k * (desc.act == ActType::q8 ? 1.25 : 4) + m * n * 4,
          4 * m * n * k};
}

size_t scratch_bytes(const UpGateDesc& desc, const Config& config) {
  if (cuda::is_cuda(kVariants, config)) return cuda::choice_scratch_bytes(cuda::shape_of(desc), choice_of(config));
  return product_scratch_bytes(tiling_of(config), weights_of(desc), 2);
}

void launch(const Config& config, const UpGateDesc& desc, const UpGateArgs& args, CpuContext& context) {
  const Tiling tiling = tiling_of(config);
  const Weights weights = weights_of(desc, context.copies);
  const GatePair pair = {args.w_gate, args.w_up, args.bias_gate, args.bias_up, desc.activation};
  const int64_t groups = (weights.tiles() + tiling.group - 1) / tiling.group;
  const int64_t blocks = (desc.m + tiling.block - 1) / tiling.block;
  const int64_t parts = tiling.split == Split::blocks ? blocks : 1;

  run_tasks(context, groups * parts, tiling.split, [&](int64_t task, std::byte* base) {
    const int64_t part = task % parts, group = task / parts;
    const ProductScratch scratch(base, tiling, 2);
    for (int64_t block = parts > 1 ? part : 0; block < (parts > 1 ? part + 1 : blocks); ++block) {
      const int64_t from = block * tiling.block;
      const int m = static_cast<int>(std::min<int64_t>(tiling.block, desc.m - from));
      for (int t = 0; t < m; ++t) {
        scratch.rows[t] = static_cast<const std::byte*>(args.x) + (from + t) * args.x_stride_bytes;
        scratch.y[t] = args.y + (from + t) * args.y_stride;
      }
      run_gate_pair(tiling, weights, pair, group * tiling.group, m, scratch, context.isa);
    }
  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const UpGateDesc& desc, const UpGateArgs& args, CudaStream& stream) {
  const cuda::Shape shape = cuda::shape_of(desc);
  cuda::Problem p;
  p.type = desc.type;
  p.rows = static_cast<int32_t>(shape.rows);
  p.n = static_cast<int32_t>(desc.n);
  p.k = static_cast<int32_t>(desc.k);
  p.x = static_cast<const uint8_t*>(args.x);
  p.x_stride = args.x_stride_bytes;
  p.y = args.y;
  p.w = static_cast<const uint8_t*>(args.w_gate);
  p.w_up = static_cast<const uint8_t*>(args.w_up);
  p.bias = args.bias_gate;
  p.bias_up = args.bias_up;
  p.activation = desc.activation;
  p.y_stride = args.y_stride;
  if (desc.norm) cuda::set_norm(p, args.norm);
  cuda::run(choice_of(config), shape, p, stream);
}
#endif

}  // namespace dyno::ops
