#include "ops/moe_down_sum/moe_down_sum.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/cuda/ring.h"
#include "ops/matmul/gpu_layout.h"
#include "ops/matmul/layout.h"
#include "ops/matmul/product.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY moe_down_sum
#define DYNO_FAMILY_DESC MoeDownSumDesc
#define DYNO_FAMILY_VARIANTS "ops/moe_down_sum/variants.def"
#include "ops/family_table.inc"

namespace {

cuda::Choice choice_of(const Config& config) { return cuda::choice_of(kVariants, config); }
cuda::Shape shape_of(const MoeDownSumDesc& desc) {
  cuda::Shape shape = cuda::shape_of(desc);
  shape.x_rows = shape.rows;
  return shape;
}

}  // namespace

Support supports(const MoeDownSumDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes =
      check_sizes({{"m", desc.m}, {"n", desc.n}, {"k", desc.k}, {"experts", desc.experts}, {"used", desc.used}});
  if (!sizes) return sizes;
  if (desc.shared < 0) return Support::no(str_cat("shared=", desc.shared, " is below 0"));
  if (Support s = supports_weights(desc.type, desc.layout, ActType::f32, desc.k); !s) return s;
  if (Support s = check_config(Family::moe_down_sum, kVariants, kInstances, config, device); !s) return s;
  if (desc.shared > 0) {
    if (Support s = supports_weights(desc.type, desc.layout, ActType::f32, desc.shared); !s) return s;
    if (config.variant == k_ring) return Support::no("only stream adds the product of a shared expert");
  }
  if (config.variant == k_stream && stream_params::of(config).stripes > 1 && !cuda::has_block_codes(desc.type)) {
    return Support::no(str_cat("stream adds floats of one stripe per block, not ", dtype_name(desc.type), " of two"));
  }
  return cuda::supports_choice(shape_of(desc), choice_of(config), device);
}

Config default_config(const MoeDownSumDesc& desc, const DeviceInfo& device) {
  // A token's experts are concatenated along k.
  const int64_t blocks = (desc.n + kGpuRows - 1) / kGpuRows * desc.m;
  if (desc.m == 1 && desc.shared == 0) {
    const auto ring = cuda::default_ring(shape_of(desc), blocks, desc.used, device);
    if (ring) return cuda::config_of(kVariants, *ring);
  }
  const int64_t k_tiles = (desc.k + kGpuTile - 1) / kGpuTile * desc.used + (desc.shared + kGpuTile - 1) / kGpuTile;
  const auto warps = [&](int64_t of) { return cuda::stream_warps(of, k_tiles, device).value_or(4); };
  // Two stripes share the conversion of x. Measured on an H200 (h200_walk.json, h200_few_tokens.json): for one token,
  // this pays if twice as many warps then fit; for several tokens always, in blocks of eight warps and more.
  constexpr int64_t kTilesOfWarp = 2, kWarps = 8;
  const int one = warps(blocks);
  int two = warps((desc.n + 2 * kGpuRows - 1) / (2 * kGpuRows) * desc.m);
  if (desc.m > 1 && k_tiles >= kTilesOfWarp * kWarps) two = std::max<int>(two, kWarps);
  const bool pairs = cuda::has_block_codes(desc.type) && (desc.m > 1 || two > one);
  return stream_params{.warps = static_cast<int16_t>(pairs ? two : one),
                       .stripes = static_cast<int16_t>(pairs ? 2 : 1)};
}

Cost cost(const MoeDownSumDesc& desc) {
  const double m = static_cast<double>(desc.m), n = static_cast<double>(desc.n), k = static_cast<double>(desc.k);
  const double used = static_cast<double>(desc.used);
  const double matrix = static_cast<double>(layout_bytes(desc.type, desc.layout, desc.n, desc.k));
  const double experts = std::min(static_cast<double>(desc.experts), m * used);
  const double shared = static_cast<double>(desc.shared);
  const double shared_matrix =
      desc.shared > 0 ? static_cast<double>(layout_bytes(desc.type, desc.layout, desc.n, desc.shared)) : 0;
  return {matrix * experts + shared_matrix + m * (used * k + shared) * 4 + m * n * 8,
          2 * m * n * (used * (k + 1) + shared)};
}

size_t scratch_bytes(const MoeDownSumDesc&, const Config&) { return 0; }

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const MoeDownSumDesc& desc, const MoeDownSumArgs& args, CudaStream& stream) {
  cuda::Problem p;
  p.type = desc.type;
  p.rows = static_cast<int32_t>(desc.m * desc.used);
  p.n = static_cast<int32_t>(desc.n);
  p.k = static_cast<int32_t>(desc.k);
  p.x = reinterpret_cast<const uint8_t*>(args.x);
  p.x_stride = desc.k * static_cast<int64_t>(sizeof(float));
  p.w = static_cast<const uint8_t*>(args.w);
  p.w_stride = args.w_expert_stride_bytes;
  p.matrices = static_cast<int32_t>(desc.experts);
  p.grouping = cuda::Grouping::summed;
  p.ids = args.ids;
  p.settled = args.settled;
  p.slot_weights = args.weights;
  p.used = static_cast<int32_t>(desc.used);
  p.bias = args.bias;
  p.residual = args.residual;
  p.scale = args.scale;
  p.y = args.out;
  p.y_stride = desc.n;
  if (desc.shared > 0) {
    p.shared = {
        .w = static_cast<const uint8_t*>(args.shared_w), .x = args.shared_x, .k = static_cast<int32_t>(desc.shared)};
  }
  cuda::run_stream(p, desc.type, choice_of(config), stream);
}
#endif

}  // namespace dyno::ops
