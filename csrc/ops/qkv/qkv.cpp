#include "ops/qkv/qkv.h"

#include "core/error.h"
#include "ops/contract.h"
#include "ops/matmul/cuda/choice.h"
#include "ops/matmul/layout.h"
#include "ops/matmul/product.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY qkv
#define DYNO_FAMILY_DESC QkvDesc
#define DYNO_FAMILY_VARIANTS "ops/qkv/variants.def"
#include "ops/family_table.inc"

namespace {

constexpr int64_t kStreamedTokens = 3;  // from 4 tokens on, a ring on tensor cores is faster, as for a single product

// The second type, or desc.type if there is none; empty if there are three types.
std::optional<DType> other_type(const QkvDesc& desc) {
  const DType v = desc.n_v > 0 ? desc.type_v : desc.type;
  if (desc.type_k == desc.type) return v;
  return v == desc.type || v == desc.type_k ? std::optional(desc.type_k) : std::nullopt;
}

// The three products as one product with their total number of rows.
cuda::Shape shape_of(const QkvDesc& desc) {
  return {.type = desc.type,
          .layout = desc.layout,
          .rows = desc.m,
          .n = desc.n + desc.n_k + desc.n_v,
          .k = desc.k,
          .x_rows = desc.m,
          .norm = desc.norm,
          .other = other_type(desc)};
}

}  // namespace

Support supports(const QkvDesc& desc, const Config& config, const DeviceInfo& device) {
  if (Support s = check_sizes({{"m", desc.m}, {"n", desc.n}, {"n_k", desc.n_k}, {"k", desc.k}}); !s) return s;
  if (desc.n_v < 0) return Support::no(str_cat("n_v=", desc.n_v, " is below 0"));
  for (const DType type : {desc.type, desc.type_k, desc.n_v > 0 ? desc.type_v : desc.type}) {
    if (Support s = supports_weights(type, desc.layout, ActType::f32, desc.k); !s) return s;
  }
  const std::optional<DType> other = other_type(desc);
  if (!other || !cuda::stream_takes_both(desc.type, *other)) {
    return Support::no(str_cat("no kernel multiplies with ", dtype_name(desc.type), ", ", dtype_name(desc.type_k),
                               " and ", dtype_name(desc.type_v), " at once"));
  }
  if (Support s = check_config(Family::qkv, kVariants, kInstances, config, device); !s) return s;
  return cuda::supports_choice(shape_of(desc), cuda::choice_of(kVariants, config), device);
}

Config default_config(const QkvDesc& desc, const DeviceInfo& device) {
  cuda::Shape shape = shape_of(desc);
  const auto has_parts = [&](cuda::Kernel kernel) {
    const bool tiles = kernel == cuda::Kernel::wgmma || cuda::has_wide_tiles(kernel);
    return cuda::is_gemm_ring(kernel) || (tiles && desc.m > cuda::kRingTokens);
  };
  if (!desc.norm && desc.m > kStreamedTokens) {
    shape.path = ProductPath::mmq;
    const cuda::Choice choice = cuda::default_choice(shape, device);
    if (has_parts(choice.kernel)) return cuda::config_of(kVariants, choice);
  }
  shape.path = ProductPath::any;
  shape.norm = true;
  const cuda::Choice choice = cuda::default_choice(shape, device);
  const bool taken = cuda::path_of(choice.kernel) == ProductPath::matvec || has_parts(choice.kernel);
  return taken ? cuda::config_of(kVariants, choice) : stream_params{.warps = 8, .stripes = 1};
}

Cost cost(const QkvDesc& desc) {
  const double m = static_cast<double>(desc.m), k = static_cast<double>(desc.k);
  const double n = static_cast<double>(desc.n + desc.n_k + desc.n_v);
  double weights = static_cast<double>(layout_bytes(desc.type, desc.layout, desc.n, desc.k)) +
                   static_cast<double>(layout_bytes(desc.type_k, desc.layout, desc.n_k, desc.k));
  if (desc.n_v > 0) weights += static_cast<double>(layout_bytes(desc.type_v, desc.layout, desc.n_v, desc.k));
  return {weights + m * (k + n) * 4, 2 * m * n * k};
}

size_t scratch_bytes(const QkvDesc& desc, const Config& config) {
  return cuda::choice_scratch_bytes(shape_of(desc), cuda::choice_of(kVariants, config));
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const QkvDesc& desc, const QkvArgs& args, CudaStream& stream) {
  const DType types[] = {desc.type, desc.type_k, desc.type_v};
  const int64_t heights[] = {desc.n, desc.n_k, desc.n_v};
  cuda::Problem p;
  p.type = desc.type;
  p.rows = static_cast<int32_t>(desc.m);
  p.n = static_cast<int32_t>(desc.n);
  p.k = static_cast<int32_t>(desc.k);
  p.x = reinterpret_cast<const uint8_t*>(args.x);
  p.x_stride = args.x_stride_bytes;
  p.w = static_cast<const uint8_t*>(args.w[0]);
  p.bias = args.bias[0];
  p.y = args.y[0];
  p.y_stride = args.y_stride[0];
  for (int i = 1; i < 3 && heights[i] > 0; ++i) {
    p.more[i - 1] = {.type = types[i],
                     .n = static_cast<int32_t>(heights[i]),
                     .w = static_cast<const uint8_t*>(args.w[i]),
                     .bias = args.bias[i],
                     .y = args.y[i],
                     .y_stride = args.y_stride[i]};
  }
  if (desc.norm) cuda::set_norm(p, args.norm);
  const cuda::Choice choice = cuda::choice_of(kVariants, config);
  if (cuda::path_of(choice.kernel) == ProductPath::mmq) return cuda::run(choice, shape_of(desc), p, stream);
  cuda::run_stream(p, *other_type(desc), choice, stream);
}
#endif

}  // namespace dyno::ops
