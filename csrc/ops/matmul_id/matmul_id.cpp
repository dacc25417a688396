#include "ops/matmul_id/matmul_id.h"

#include "ops/contract.h"
#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/product.h"
#include "ops/matmul_id/expert_groups.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY matmul_id
#define DYNO_FAMILY_DESC MatmulIdDesc
#define DYNO_FAMILY_VARIANTS "ops/matmul_id/variants.def"
#include "ops/family_table.inc"

namespace {

cuda::Choice choice_of(const Config& config) { return cuda::choice_of(kVariants, config); }

Tiling tiling_of(const Config& config) {
  if (config.variant == k_by_row) return matvec_tiling(by_row_params::of(config), 1);
  if (config.variant == k_dot) return dot_tiling(dot_params::of(config));
  return gemm_tiling(by_expert_params::of(config), false);
}

Weights weights_of(const MatmulIdDesc& desc, const NumaCopies* copies = nullptr) {
  return {desc.type, desc.layout, desc.n, desc.k, copies};
}

// Multiplies tiles [first, first + n_tiles) of one expert by the flat rows in scratch, and writes y.
void run_group(const Tiling& tiling, const Weights& weights, const MatmulIdArgs& args, int64_t expert, int64_t first,
               const int32_t* rows, int m, int64_t x_divisor, const ProductScratch& scratch, CpuIsa isa) {
  const std::byte* w = static_cast<const std::byte*>(args.w) + expert * args.w_expert_stride_bytes;
  const int n_tiles = static_cast<int>(std::min<int64_t>(tiling.group, weights.tiles() - first));
  WeightTile tiles[kMaxGroupTiles];
  for (int i = 0; i < n_tiles; ++i) tiles[i] = weights.tile(w, first + i);
  const int64_t column = first * kTileRows;
  for (int t = 0; t < m; ++t) {
    scratch.rows[t] = static_cast<const std::byte*>(args.x) + rows[t] / x_divisor * args.x_stride_bytes;
    scratch.y[t] = args.y + rows[t] * weights.n + column;
  }
  compute_product(tiling, weights, tiles, n_tiles, m, scratch, isa);
  LinearEpilogue epilogue;
  epilogue.c = scratch.c;
  epilogue.ldc = n_tiles * kTileRows;
  epilogue.m = m;
  epilogue.columns = static_cast<int>(std::min<int64_t>(epilogue.ldc, weights.n - column));
  epilogue.bias = args.bias == nullptr ? nullptr : args.bias + expert * weights.n + column;
  epilogue.y = scratch.y;
#ifdef DYNO_TEST_FAULTS
  epilogue.scale *= fault_factor(tiling, first / tiling.group);
#endif
  DYNO_DISPATCH_ISA(isa, epilogue_linear(epilogue));
}

}  // namespace

Support supports(const MatmulIdDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes =
      check_sizes({{"m", desc.m}, {"n", desc.n}, {"k", desc.k}, {"experts", desc.experts}, {"used", desc.used}});
  if (!sizes) return sizes;
  if (Support s = supports_weights(desc.type, desc.layout, desc.act, desc.k); !s) return s;
  if (Support s = check_config(Family::matmul_id, kVariants, kInstances, config, device); !s) return s;
  if (device.kind == DeviceKind::cuda) return cuda::supports_choice(cuda::shape_of(desc), choice_of(config), device);
  if (desc.layout == Layout::gpu) return Support::no("layout gpu is read by CUDA kernels only");
  if (desc.path != ProductPath::any) return Support::no("only CUDA devices have paths");
  return supports_tiling(tiling_of(config), desc.type, desc.act, 1, device);
}

Config default_config(const MatmulIdDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    return cuda::config_of(kVariants, cuda::default_choice(cuda::shape_of(desc), device));
  }
  const bool wide = device.isa == CpuIsa::avx512_vnni;
  // Up to this number, matvec is faster. Unpacking plain rows costs more, so storing unpacked weights pays off earlier.
  const int16_t few = desc.layout == Layout::x16 ? 8 : 4;
  Config wanted;
  if (desc.act == ActType::f32) {
    wanted = wide ? dot_params{.rows = 4, .tokens = 6, .split = 1} : dot_params{.rows = 4, .tokens = 2, .split = 1};
  } else if (desc.m == 1) {
    wanted = by_row_params{.rows = 64, .prefetch = 4096, .split = 1};
  } else {
    wanted = wide ? by_expert_params{.rows = 64, .tokens = 3, .kc = 512, .block = 96, .few = few}
                  : by_expert_params{.rows = 16, .tokens = 3, .kc = 512, .block = 96, .few = 4};
  }
  return nearest_instance(kInstances, wanted, [&](const Config& c) { return supports(desc, c, device).ok; });
}

Cost cost(const MatmulIdDesc& desc) { return moe_cost(desc, 1); }

size_t scratch_bytes(const MatmulIdDesc& desc, const Config& config) {
  if (cuda::is_cuda(kVariants, config)) return cuda::choice_scratch_bytes(cuda::shape_of(desc), choice_of(config));
  return product_scratch_bytes(tiling_of(config), weights_of(desc), 1);
}

void launch(const Config& config, const MatmulIdDesc& desc, const MatmulIdArgs& args, CpuContext& context) {
  const Tiling tiling = tiling_of(config);
  const Weights weights = weights_of(desc, context.copies);
  const int64_t groups = (weights.tiles() + tiling.group - 1) / tiling.group;
  const int64_t divisor = desc.x_per_slot ? 1 : desc.used;

  ExpertGroups::zero_rows_of_none(context, args.ids, desc, args.y);
  if (config.variant == k_by_row) {
    run_tasks(context, desc.m * desc.used * groups, tiling.split, [&](int64_t task, std::byte* base) {
      const int32_t row = static_cast<int32_t>(task / groups);
      if (args.ids[row] == kNoExpert) return;
      run_group(tiling, weights, args, args.ids[row], task % groups * tiling.group, &row, 1, divisor,
                ProductScratch(base, tiling, 1), context.isa);
    });
    return;
  }
  const ExpertGroups experts(args.ids, desc.m, desc.used, desc.experts, args.workspace);
  run_tasks(context, experts.n_active() * groups, tiling.split, [&](int64_t task, std::byte* base) {
    const int64_t expert = experts.expert(task / groups), count = experts.count(expert);
    for (int64_t from = 0; from < count; from += tiling.block) {
      run_group(tiling, weights, args, expert, task % groups * tiling.group, experts.rows(expert) + from,
                static_cast<int>(std::min<int64_t>(tiling.block, count - from)), divisor,
                ProductScratch(base, tiling, 1), context.isa);
    }
  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MatmulIdDesc& desc, const MatmulIdArgs& args, CudaStream& stream) {
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
  p.w_stride = args.w_expert_stride_bytes;
  p.matrices = static_cast<int32_t>(desc.experts);
  p.grouping = cuda::Grouping::experts;
  p.ids = args.ids;
  p.groups = args.workspace;
  p.x_divisor = static_cast<int32_t>(desc.x_per_slot ? 1 : desc.used);
  p.y_stride = desc.n;
  cuda::run(choice_of(config), shape, p, stream);
}
#endif

}  // namespace dyno::ops
