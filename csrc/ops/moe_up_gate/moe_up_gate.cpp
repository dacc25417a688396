#include "ops/moe_up_gate/moe_up_gate.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/cuda/walk.h"
#include "ops/matmul/gate_pair.h"
#include "ops/matmul_id/expert_groups.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY moe_up_gate
#define DYNO_FAMILY_DESC MoeUpGateDesc
#define DYNO_FAMILY_VARIANTS "ops/moe_up_gate/variants.def"
#include "ops/family_table.inc"

namespace {

cuda::Choice choice_of(const Config& config) { return cuda::choice_of(kVariants, config); }

Support supports_shared(const MoeUpGateDesc& desc, const Config& config, const DeviceInfo& device) {
  if (desc.shared < 0) return Support::no(str_cat("shared=", desc.shared, " is below 0"));
  if (desc.shared == 0) return Support::yes();
  if (desc.m > 1)
    return Support::no(str_cat("m=", desc.m, ": a shared expert's matrices join the experts of one token only"));
  if (device.kind != DeviceKind::cuda || config.variant != k_walk) {
    return Support::no("only the CUDA kernel walk multiplies by a shared expert's matrices");
  }
  return Support::yes();
}

Support supports_bytes(const MoeUpGateDesc& desc, const DeviceInfo& device) {
  if (!desc.bytes) return Support::yes();
  if (device.kind != DeviceKind::cuda) return Support::no("only CUDA kernels read rows as bytes");
  if (desc.norm) return Support::no("rows in bytes are normalised already");
  if (desc.layout != Layout::gpu || !cuda::has_block_codes(desc.type)) {
    return Support::no(str_cat("no kernel multiplies weights of type ", dtype_name(desc.type), " in layout ",
                               layout_name(desc.layout), " by rows in bytes"));
  }
  return Support::yes();
}

Tiling tiling_of(const Config& config) {
  if (config.variant == k_by_row) return matvec_tiling(by_row_params::of(config), 2);
  if (config.variant == k_dot) return dot_tiling(dot_params::of(config));
  return gemm_tiling(by_expert_params::of(config), true);
}

Weights weights_of(const MoeUpGateDesc& desc, const NumaCopies* copies = nullptr) {
  return {desc.type, desc.layout, desc.n, desc.k, copies};
}

// Multiplies tiles of one expert, starting at `first`, by `m` flat rows, and writes y.
void run_group(const Tiling& tiling, const Weights& weights, const MoeUpGateDesc& desc, const MoeUpGateArgs& args,
               int64_t expert, int64_t first, const int32_t* rows, int m, const ProductScratch& scratch, CpuIsa isa) {
  for (int t = 0; t < m; ++t) {
    scratch.rows[t] = static_cast<const std::byte*>(args.x) + rows[t] / desc.used * args.x_stride_bytes;
    scratch.y[t] = args.y + rows[t] * desc.n;
  }
  const int64_t offset = expert * args.w_expert_stride_bytes;
  GatePair pair;
  pair.w_gate = static_cast<const std::byte*>(args.w_gate) + offset;
  pair.w_up = static_cast<const std::byte*>(args.w_up) + offset;
  pair.bias_gate = args.bias_gate == nullptr ? nullptr : args.bias_gate + expert * desc.n;
  pair.bias_up = args.bias_up == nullptr ? nullptr : args.bias_up + expert * desc.n;
  pair.activation = desc.activation;
  run_gate_pair(tiling, weights, pair, first, m, scratch, isa);
#ifdef DYNO_TEST_FAULTS
  const int64_t columns = std::min<int64_t>(tiling.group * kTileRows, desc.n - first * kTileRows);
  const float fault = fault_factor(tiling, first / tiling.group);
  for (int t = 0; t < m; ++t) {
    for (int64_t i = 0; i < columns; ++i) scratch.y[t][i] *= fault;  // run_gate_pair() moved the rows to the column
  }
#endif
}

}  // namespace

Support supports(const MoeUpGateDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes =
      check_sizes({{"m", desc.m}, {"n", desc.n}, {"k", desc.k}, {"experts", desc.experts}, {"used", desc.used}});
  if (!sizes) return sizes;
  if (Support s = supports_weights(desc.type, desc.layout, desc.act, desc.k); !s) return s;
  if (Support s = check_config(Family::moe_up_gate, kVariants, kInstances, config, device); !s) return s;
  if (Support s = supports_shared(desc, config, device); !s) return s;
  if (Support s = supports_bytes(desc, device); !s) return s;
  if (device.kind == DeviceKind::cuda) return cuda::supports_choice(cuda::shape_of(desc), choice_of(config), device);
  if (desc.layout == Layout::gpu) return Support::no("layout gpu is read by CUDA kernels only");
  if (desc.norm) return Support::no("only CUDA kernels normalise the rows of a product");
  if (desc.path != ProductPath::any) return Support::no("only CUDA devices have paths");
  return supports_tiling(tiling_of(config), desc.type, desc.act, 1, device);
}

Config default_config(const MoeUpGateDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda && desc.shared > 0) {
    return cuda::config_of(kVariants, cuda::walk_choice(cuda::shape_of(desc)));
  }
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
                  : by_expert_params{.rows = 32, .tokens = 2, .kc = 512, .block = 96, .few = 4};
  }
  return nearest_instance(kInstances, wanted, [&](const Config& c) { return supports(desc, c, device).ok; });
}

Cost cost(const MoeUpGateDesc& desc) {
  Cost cost = moe_cost(desc, 2);
  if (desc.shared > 0) {
    const double m = static_cast<double>(desc.m), n = static_cast<double>(desc.shared);
    cost.bytes += 2 * static_cast<double>(layout_bytes(desc.type, desc.layout, desc.shared, desc.k)) + m * n * 4;
    cost.flops += 4 * m * n * static_cast<double>(desc.k);
  }
  return cost;
}

size_t scratch_bytes(const MoeUpGateDesc& desc, const Config& config) {
  if (cuda::is_cuda(kVariants, config)) return cuda::choice_scratch_bytes(cuda::shape_of(desc), choice_of(config));
  return product_scratch_bytes(tiling_of(config), weights_of(desc), 2);
}

bool settles_ids(const Config& config, const MoeUpGateDesc&) {
  return cuda::is_cuda(kVariants, config) && cuda::lets_next_start_late(choice_of(config));
}

bool takes_shared(const MoeUpGateDesc& desc, const DeviceInfo& device) {
  return supports(desc, default_config(desc, device), device).ok;
}

void launch(const Config& config, const MoeUpGateDesc& desc, const MoeUpGateArgs& args, CpuContext& context) {
  const Tiling tiling = tiling_of(config);
  const Weights weights = weights_of(desc, context.copies);
  const int64_t groups = (weights.tiles() + tiling.group - 1) / tiling.group;

  ExpertGroups::zero_rows_of_none(context, args.ids, desc, args.y);
  if (config.variant == k_by_row) {
    run_tasks(context, desc.m * desc.used * groups, tiling.split, [&](int64_t task, std::byte* base) {
      const int32_t row = static_cast<int32_t>(task / groups);
      if (args.ids[row] == kNoExpert) return;
      run_group(tiling, weights, desc, args, args.ids[row], task % groups * tiling.group, &row, 1,
                ProductScratch(base, tiling, 2), context.isa);
    });
    return;
  }
  const ExpertGroups experts(args.ids, desc.m, desc.used, desc.experts, args.workspace);
  run_tasks(context, experts.n_active() * groups, tiling.split, [&](int64_t task, std::byte* base) {
    const int64_t expert = experts.expert(task / groups), count = experts.count(expert);
    for (int64_t from = 0; from < count; from += tiling.block) {
      run_group(tiling, weights, desc, args, expert, task % groups * tiling.group, experts.rows(expert) + from,
                static_cast<int>(std::min<int64_t>(tiling.block, count - from)), ProductScratch(base, tiling, 2),
                context.isa);
    }
  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MoeUpGateDesc& desc, const MoeUpGateArgs& args, CudaStream& stream) {
  const cuda::Shape shape = cuda::shape_of(desc);
  cuda::Problem p;
  p.type = desc.type;
  p.rows = static_cast<int32_t>(shape.rows);
  p.n = static_cast<int32_t>(desc.n);
  p.k = static_cast<int32_t>(desc.k);
  p.x = static_cast<const uint8_t*>(args.x);
  p.x_stride = args.x_stride_bytes;
  if (desc.bytes) p.x_bytes = static_cast<const uint8_t*>(args.x_bytes);
  p.y = args.y;
  p.w = static_cast<const uint8_t*>(args.w_gate);
  p.w_up = static_cast<const uint8_t*>(args.w_up);
  p.bias = args.bias_gate;
  p.bias_up = args.bias_up;
  p.activation = desc.activation;
  p.w_stride = args.w_expert_stride_bytes;
  p.matrices = static_cast<int32_t>(desc.experts);
  p.grouping = cuda::Grouping::experts;
  p.ids = args.ids;
  p.groups = args.workspace;
  p.x_divisor = static_cast<int32_t>(desc.used);
  p.y_stride = desc.n;
  if (desc.norm) cuda::set_norm(p, args.norm);
  if (desc.shared > 0) {
    const cuda::Choice choice = choice_of(config);
    const cuda::SharedPair pair{.w = static_cast<const uint8_t*>(args.shared_gate),
                                .w_up = static_cast<const uint8_t*>(args.shared_up),
                                .y = args.shared_y,
                                .n = static_cast<int32_t>(desc.shared)};
    return cuda::run_walk(p, pair, choice.warps, choice.blocks, stream.device->sm_count, stream.handle);
  }
  cuda::run(choice_of(config), shape, p, stream);
}
#endif

}  // namespace dyno::ops
