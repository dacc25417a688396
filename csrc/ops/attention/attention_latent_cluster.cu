// The launch of latent attention by clusters, alone or with norm, rotation and store.
#include "ops/attention/latent_cluster.cuh"

#include "core/cuda/launch_cluster.h"
#include "ops/attention/adaptive.h"

namespace dyno::ops {
namespace {

template <bool kFused>
void start(const latent_cluster::LatentTask& task, const AttentionDesc& desc, CudaStream& stream) {
  const int clusters = task.direct.common.splits;
  const auto kernel = desc.k_type == DType::f32    ? latent_cluster::latent_cluster_kernel<device::Scalar::f32, kFused>
                      : desc.k_type == DType::bf16 ? latent_cluster::latent_cluster_kernel<device::Scalar::bf16, kFused>
                                                   : latent_cluster::latent_cluster_kernel<device::Scalar::f16, kFused>;
  const size_t shared = latent_cluster_shared_bytes(desc.k_type, kFused);
  DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  const AttentionTiles tiles{latent_cluster::kRows, task.direct.common.group};
  const dim3 grid(static_cast<unsigned>(tiles.bound(desc.m, task.direct.common.args.n_runs)),
                  static_cast<unsigned>(desc.kv_heads), static_cast<unsigned>(clusters * kClusterBlocks));
  const char* op = kFused ? "rope_attention" : "attention";
  launch_dependent_cluster(op, kernel, grid, 32 * latent_cluster::kWarps, kClusterBlocks, shared, stream.handle, task);
  if (clusters == 1) return;
  add_parts<latent_cluster::kRows, latent_cluster::ClusterParts>(op, task.direct.common, grid.x, stream.handle);
}

latent_cluster::LatentTask task_of(const AttentionArgs& args, const AttentionDesc& desc, int clusters,
                                   CudaStream& stream) {
  clusters = parts_of_keys(launch_shape(desc, args), clusters, kClusterBlocks * kClusterKeys);
  latent_cluster::LatentTask task{};
  task.direct.common = make_cuda_attention(args, desc, clusters, stream);
  const auto whole = [](const void* p, int64_t row) {
    return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(row)) % 16 == 0;
  };
  task.direct.aligned = whole(args.k_cache, args.k_row_bytes);
  task.direct.early = args.settled && task.direct.aligned;  // loads bypass L1, which may have old rows
  task.vector = whole(args.q, args.q_stride * 4) && desc.dk % 4 == 0;
  return task;
}

}  // namespace

void attention_latent_cluster_cuda(const AttentionArgs& args, const AttentionDesc& desc, int clusters,
                                   CudaStream& stream) {
  start<false>(task_of(args, desc, clusters, stream), desc, stream);
}

void rope_attention_latent_cuda(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int clusters,
                                CudaStream& stream) {
  latent_cluster::LatentTask task = task_of(args.attention(), desc.attention(), clusters, stream);
  task.direct.fresh = make_fresh_rows(args, desc);
  const int64_t head = desc.nope + desc.n_rot;
  task.direct.fresh.q_rotary = args.q_rotary + desc.nope;
  task.direct.fresh.q_rotary_stride = args.q_rotary_stride;
  task.direct.fresh.q_rotary_head = static_cast<int>(head);
  task.vector &= (reinterpret_cast<uintptr_t>(args.q_rotary) | static_cast<uintptr_t>(args.q_rotary_stride * 4) |
                  static_cast<uintptr_t>(head * 4) | static_cast<uintptr_t>(desc.nope * 4)) %
                     16 ==
                 0;
  start<true>(task, desc.attention(), stream);
}

}  // namespace dyno::ops
