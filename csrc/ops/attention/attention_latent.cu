// The launch of latent attention.
#include "ops/attention/latent.cuh"

#include "core/cuda/launch.h"
#include "ops/attention/adaptive.h"

namespace dyno::ops {

template <bool kSelected>
static auto latent_kernel_for(DType type) -> void (*)(DirectTask) {
  return type == DType::f32    ? latent::latent_kernel<device::Scalar::f32, kSelected>
         : type == DType::bf16 ? latent::latent_kernel<device::Scalar::bf16, kSelected>
                               : latent::latent_kernel<device::Scalar::f16, kSelected>;
}

void attention_latent_cuda(const AttentionArgs& args, const AttentionDesc& desc, int splits, CudaStream& stream) {
  splits = parts_of_keys(launch_shape(desc, args), splits, latent::kMinTiles * direct::kTileKeys);
  DirectTask task{};
  task.common = make_cuda_attention(args, desc, splits, stream);
  const uintptr_t address = reinterpret_cast<uintptr_t>(args.k_cache) | static_cast<uintptr_t>(args.k_row_bytes);
  task.aligned = address % 16 == 0;
  task.early = args.settled && address % 32 == 0;
  const AttentionTiles tiles{latent::kRows, task.common.group};
  const bool selected = desc.selected > 0;
  const auto blocks = static_cast<unsigned>(tiles.bound(desc.m, selected ? desc.m : args.n_runs));
  const auto heads = static_cast<unsigned>(desc.kv_heads);
  const auto kernel = selected ? latent_kernel_for<true>(desc.k_type) : latent_kernel_for<false>(desc.k_type);
  const size_t shared = latent_shared_bytes(desc.k_type);
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  const dim3 grid(blocks, heads, static_cast<unsigned>(splits));
  launch_dependent("attention", kernel, grid, 32 * latent::kWarps, shared, stream.handle, task);
  if (splits == 1) return;
  using Parts = direct::BlockParts<latent::kMinTiles>;
  const auto add = selected ? add_parts<latent::kRows, Parts, true> : add_parts<latent::kRows, Parts>;
  add("attention", task.common, blocks, stream.handle);
}

}  // namespace dyno::ops
