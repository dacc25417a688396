#include "ops/norm_route/norm_route.h"

#include "core/error.h"
#include "gguf/dequantize.h"
#include "ops/contract.h"
#include "ops/matmul/layout.h"
#include "ops/moe_route/kernels.h"
#include "ops/moe_route/moe_route.h"
#include "ops/norm/kernels.h"
#include "ops/norm_route/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY norm_route
#define DYNO_FAMILY_DESC NormRouteDesc
#define DYNO_FAMILY_VARIANTS "ops/norm_route/variants.def"
#include "ops/family_table.inc"

namespace {

int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

Support cluster_supports(const NormRouteDesc& desc, int warps, const DeviceInfo& device) {
  if (const Support clusters = clusters_supported(device); !clusters) return clusters;
  if (desc.type != DType::f32) {
    return Support::no(str_cat("the router has type ", dtype_name(desc.type), "; variant cluster reads f32"));
  }
  const int64_t rows = route_cluster_rows(desc.experts);
  if (rows > kRouteWarpRows * warps || desc.experts > kRouteClusterMaxExperts) {
    return Support::no(
        str_cat("experts=", desc.experts, " are ", rows, " for each block of ", warps, " warps; expected up to ",
                std::min<int64_t>(kRouteWarpRows * warps * kRouteClusterBlocks, kRouteClusterMaxExperts)));
  }
  // The registers allow four times 128 elements per row.
  const int64_t most = std::min<int64_t>(kRouteClusterMaxK, 4 * 128 * route_cluster_parts(desc.experts, warps));
  if (desc.k % 4 != 0 || desc.k > most) {
    return Support::no(str_cat("k=", desc.k, " is not a multiple of 4 up to ", most));
  }
  return Support::yes();
}

}  // namespace

Support supports(const NormRouteDesc& desc, const Config& config, const DeviceInfo& device) {
  if (const Support sizes = check_sizes({{"k", desc.k}}); !sizes) return sizes;
  const MoeRouteDesc route = desc.route();
  if (const Support routing = supports(route, default_config(route, device), device); !routing) return routing;
  if (!layout_supported(desc.type, desc.layout)) {
    return Support::no(str_cat("type=", dtype_name(desc.type), " has no layout=", layout_name(desc.layout)));
  }
  if (desc.k % dtype_info(desc.type).block_elements != 0) {
    return Support::no(str_cat("k=", desc.k, " is not a multiple of the ", dtype_info(desc.type).block_elements,
                               " elements in a block of ", dtype_name(desc.type)));
  }
  const Support checked = check_config(Family::norm_route, kVariants, kInstances, config, device);
  if (desc.bytes && device.kind != DeviceKind::cuda) return Support::no("only CUDA kernels write rows as bytes");
  if (!checked || device.kind == DeviceKind::cpu) return checked;
  if (desc.m > kNormRouteMaxTokens) {
    return Support::no(str_cat("m=", desc.m, " tokens are more than the ", kNormRouteMaxTokens, " of a launch"));
  }
  if (!is_float(desc.type)) {
    return Support::no(str_cat("the router has type ", dtype_name(desc.type), "; only f32, f16 and bf16 can be fused"));
  }
  const Layout layout = config.variant == k_stripe ? Layout::gpu : Layout::plain;
  if (desc.layout != layout) {
    return Support::no(str_cat("variant ", kVariants[config.variant].name, " reads layout ", layout_name(layout),
                               ", not ", layout_name(desc.layout)));
  }
  if (config.variant == k_cluster) return cluster_supports(desc, cluster_params::of(config).warps, device);
  return checked;
}

Config default_config(const NormRouteDesc& desc, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda) return tokens_params{.grain = 1};
  if (desc.layout == Layout::gpu) return stripe_params{.warps = 16};
  for (const int16_t warps : {int16_t{16}, int16_t{8}}) {
    const Config cluster = cluster_params{.warps = warps};
    if (desc.m * kRouteClusterBlocks <= device.sm_count && supports(desc, cluster, device)) return cluster;
  }
  const auto rows = static_cast<int16_t>(desc.experts * desc.m <= 8 * device.sm_count ? 1 : 4);
  return rows_params{.rows = rows, .warps = static_cast<int16_t>(desc.k > 2048 ? 8 : 4)};
}

Cost cost(const NormRouteDesc& desc) {
  const Cost route = cost(desc.route());
  const double m = static_cast<double>(desc.m), k = static_cast<double>(desc.k);
  const double experts = static_cast<double>(desc.experts);
  return {
      route.bytes + m * k * 8 + k * 4 + static_cast<double>(layout_bytes(desc.type, desc.layout, desc.experts, desc.k)),
      route.flops + m * k * (4 + 2 * experts)};
}

size_t scratch_bytes(const NormRouteDesc& desc, const Config& config) {
  if (config.variant == k_cluster) return 0;
  if (config.variant != k_tokens) return static_cast<size_t>(desc.m * desc.experts) * sizeof(float);
  const int64_t route = 2 * desc.experts + desc.groups;
  return static_cast<size_t>(padded(desc.k) + 16 * padded(desc.k) + padded(desc.experts) + route) * sizeof(float);
}

void launch(const Config& config, const NormRouteDesc& desc, const NormRouteArgs& args, CpuContext& context) {
  if (args.route.pinned != nullptr) {
    for (int64_t i = 0; i < desc.m * desc.used; ++i) {
      DYNO_CHECK(PlanError, args.route.pinned[i] >= 0 && args.route.pinned[i] < desc.experts,
                 "[norm_route] pinned expert ", args.route.pinned[i], " of token ", i / desc.used, " is not in 0..",
                 desc.experts - 1);
    }
  }
  const MoeRouteShape shape{desc.experts,  desc.used, desc.groups, desc.groups_used, static_cast<int>(desc.gating),
                            desc.normalize};
  const auto matrix = static_cast<const std::byte*>(args.w);
  const size_t tile_bytes = layout_bytes(desc.type, desc.layout, 16, desc.k);
  parallel_ranges(
      context, desc.m, desc.experts * desc.k, tokens_params::of(config).grain * 1024,
      [&](int64_t begin, int64_t end, std::byte* scratch) {
        float* rows = reinterpret_cast<float*>(scratch);  // 16 rows of the router
        float* x = rows + 16 * padded(desc.k);
        float* logits = x + padded(desc.k);
        float* rest = logits + padded(desc.experts);
        for (int64_t token = begin; token < end; ++token) {
          const NormArgs norm{.x = args.x + token * args.x_stride, .weight = args.norm, .out = x, .eps = args.eps};
          DYNO_DISPATCH_ISA(context.isa, norm_rows(norm, desc.k, 1, 0, 1));
          for (int64_t first = 0; first < desc.experts; first += 16) {
            const int64_t count = std::min<int64_t>(16, desc.experts - first);
            const std::byte* tile = matrix + static_cast<size_t>(first / 16) * tile_bytes;
            if (desc.layout == Layout::plain) {
              dequantize_rows(desc.type, tile, rows, count, desc.k);
            } else {
              unpack_rows(desc.type, desc.layout, tile, rows, count, desc.k, context.isa);
            }
            for (int64_t r = 0; r < count; ++r) {
              double sum = 0;
              for (int64_t i = 0; i < desc.k; ++i)
                sum += static_cast<double>(x[i]) * static_cast<double>(rows[r * desc.k + i]);
              logits[first + r] = static_cast<float>(sum) + (args.bias == nullptr ? 0.0f : args.bias[first + r]);
            }
          }
          if (args.normed != nullptr) std::copy_n(x, desc.k, args.normed + token * args.normed_stride);
          MoeRouteArgs route = args.route;
          route.logits = logits;
          route.ids += token * desc.used;
          route.weights += token * desc.used;
          if (route.pinned != nullptr) route.pinned += token * desc.used;
          DYNO_DISPATCH_ISA(context.isa, moe_route_tokens(route, shape, 0, 1, rest));
        }
      });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const NormRouteDesc& desc, const NormRouteArgs& args, CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::experts)) {
    throw_left_out(KernelGroup::experts);
  } else {
    if (config.variant == k_stripe) {
      norm_route_stripe_cuda(args, desc, stripe_params::of(config).warps, stream);
    } else if (config.variant == k_cluster) {
      norm_route_cluster_cuda(args, desc, cluster_params::of(config).warps, stream);
    } else {
      const auto p = rows_params::of(config);
      norm_route_rows_cuda(args, desc, p.rows, p.warps, stream);
    }
  }
}
#endif

}  // namespace dyno::ops
