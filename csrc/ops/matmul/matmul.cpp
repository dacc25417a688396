#include "ops/matmul/matmul.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/product.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY matmul
#define DYNO_FAMILY_DESC MatmulDesc
#define DYNO_FAMILY_VARIANTS "ops/matmul/variants.def"
#include "ops/family_table.inc"

namespace {

cuda::Choice choice_of(const Config& config) { return cuda::choice_of(kVariants, config); }

Tiling tiling_of(const Config& config) {
  if (config.variant == k_matvec) return matvec_tiling(matvec_params::of(config), 1);
  if (config.variant == k_dot) return dot_tiling(dot_params::of(config));
  return gemm_tiling(gemm_params::of(config), false);
}

Weights weights_of(const MatmulDesc& desc, const NumaCopies* copies = nullptr) {
  return {desc.type, desc.layout, desc.n, desc.k, copies};
}

}  // namespace

Support supports(const MatmulDesc& desc, const Config& config, const DeviceInfo& device) {
  if (Support s = check_sizes({{"m", desc.m}, {"n", desc.n}, {"k", desc.k}, {"batch", desc.batch}}); !s) return s;
  if (Support s = supports_weights(desc.type, desc.layout, desc.act, desc.k); !s) return s;
  if (desc.x_tiles < 0) return Support::no(str_cat("x_tiles=", desc.x_tiles, " is below 0"));
  if (Support s = check_config(Family::matmul, kVariants, kInstances, config, device); !s) return s;
  if (device.kind == DeviceKind::cuda) return cuda::supports_choice(cuda::shape_of(desc), choice_of(config), device);
  if (desc.layout == Layout::gpu) return Support::no("layout gpu is read by CUDA kernels only");
  if (desc.norm) return Support::no("only CUDA kernels normalise the rows of a product");
  if (desc.path != ProductPath::any) return Support::no("only CUDA devices have paths");
  if (desc.x_tiles > 0) return Support::no("only CUDA kernels read f16 tiles");
  return supports_tiling(tiling_of(config), desc.type, desc.act, desc.m, device);
}

Config default_config(const MatmulDesc& desc, const DeviceInfo& device, const Neighbours& neighbours) {
  if (device.kind == DeviceKind::cuda) {
    cuda::Shape shape = cuda::shape_of(desc);
    shape.after_batch = neighbours.after_batch;
    return cuda::config_of(kVariants, cuda::default_choice(shape, device));
  }
  const bool wide = device.isa == CpuIsa::avx512_vnni;
  Config wanted;
  if (desc.act == ActType::f32) {
    wanted = wide ? dot_params{.rows = 4, .tokens = 6, .split = 1} : dot_params{.rows = 4, .tokens = 2, .split = 1};
  } else if (desc.m <= default_matvec_tokens(desc.type, desc.layout, device.isa)) {
    wanted = matvec_params{.rows = 64, .prefetch = 8192, .split = 1};
  } else {
    wanted = wide ? gemm_params{.rows = 64, .tokens = 3, .kc = 512, .block = 192, .split = 1}
                  : gemm_params{.rows = 16, .tokens = 3, .kc = 512, .block = 96, .split = 1};
  }
  return nearest_instance(kInstances, wanted, [&](const Config& c) { return supports(desc, c, device).ok; });
}

Cost cost(const MatmulDesc& desc) {
  const double m = static_cast<double>(desc.m * desc.batch), n = static_cast<double>(desc.n);
  const double k = static_cast<double>(desc.k);
  const double weights = static_cast<double>(layout_bytes(desc.type, desc.layout, desc.n, desc.k));
  return {weights * static_cast<double>(desc.batch) + m * k * (desc.act == ActType::q8 ? 1.25 : 4) + m * n * 4,
          2 * m * n * k};
}

size_t scratch_bytes(const MatmulDesc& desc, const Config& config) {
  if (cuda::is_cuda(kVariants, config)) return cuda::choice_scratch_bytes(cuda::shape_of(desc), choice_of(config));
  return product_scratch_bytes(tiling_of(config), weights_of(desc), 1);
}

void launch(const Config& config, const MatmulDesc& desc, const MatmulArgs& args, CpuContext& context) {
  const Tiling tiling = tiling_of(config);
  const Weights weights = weights_of(desc, context.copies);
  const int64_t groups = (weights.tiles() + tiling.group - 1) / tiling.group;
  const int64_t blocks = (desc.m + tiling.block - 1) / tiling.block;
  const int64_t parts = tiling.split == Split::blocks ? blocks : 1;

  run_tasks(context, desc.batch * groups * parts, tiling.split, [&](int64_t task, std::byte* base) {
    const int64_t part = task % parts, group = task / parts % groups, batch = task / parts / groups;
    const ProductScratch scratch(base, tiling, 1);
    const std::byte* w = static_cast<const std::byte*>(args.w) + batch * args.w_batch_stride_bytes;
    const int64_t first = group * tiling.group;
    const int n_tiles = static_cast<int>(std::min<int64_t>(tiling.group, weights.tiles() - first));
    WeightTile tiles[kMaxGroupTiles];
    for (int i = 0; i < n_tiles; ++i) tiles[i] = weights.tile(w, first + i);

    const int64_t column = first * kTileRows;
    LinearEpilogue epilogue;
    epilogue.c = scratch.c;
    epilogue.ldc = n_tiles * kTileRows;
    epilogue.columns = static_cast<int>(std::min<int64_t>(epilogue.ldc, desc.n - column));
    epilogue.bias = args.bias == nullptr ? nullptr : args.bias + column;
    epilogue.residual = args.residual == nullptr ? nullptr : scratch.residual;
    epilogue.scale = args.scale;
#ifdef DYNO_TEST_FAULTS
    epilogue.scale *= fault_factor(tiling, group);
#endif
    epilogue.y = scratch.y;
    for (int64_t block = parts > 1 ? part : 0; block < (parts > 1 ? part + 1 : blocks); ++block) {
      const int64_t from = block * tiling.block;
      const int m = static_cast<int>(std::min<int64_t>(tiling.block, desc.m - from));
      for (int t = 0; t < m; ++t) {
        scratch.rows[t] = static_cast<const std::byte*>(args.x) + (from + t) * args.x_stride_bytes +
                          batch * args.x_batch_stride_bytes;
        const int64_t at = (from + t) * args.y_stride + batch * args.y_batch_stride + column;
        scratch.y[t] = args.y + at;
        if (args.residual != nullptr) scratch.residual[t] = args.residual + at;
      }
      compute_product(tiling, weights, tiles, n_tiles, m, scratch, context.isa);
      epilogue.m = m;
      DYNO_DISPATCH_ISA(context.isa, epilogue_linear(epilogue));
    }
  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MatmulDesc& desc, const MatmulArgs& args, CudaStream& stream) {
  const cuda::Shape shape = cuda::shape_of(desc);
  cuda::Problem p;
  p.type = desc.type;
  p.rows = static_cast<int32_t>(shape.rows);
  p.n = static_cast<int32_t>(desc.n);
  p.k = static_cast<int32_t>(desc.k);
  p.x = static_cast<const uint8_t*>(args.x);
  p.x_stride = args.x_stride_bytes;
  p.y = args.y;
  p.w = static_cast<const uint8_t*>(args.w);
  p.bias = args.bias;
  p.w_stride = args.w_batch_stride_bytes;
  p.matrices = static_cast<int32_t>(desc.batch);
  p.residual = args.residual;
  p.scale = args.scale;
  p.x_batch_stride = args.x_batch_stride_bytes;
  p.y_stride = args.y_stride;
  p.y_batch_stride = args.y_batch_stride;
  if (desc.norm) cuda::set_norm(p, args.norm);
  cuda::run(choice_of(config), shape, p, stream);
}
#endif

}  // namespace dyno::ops
