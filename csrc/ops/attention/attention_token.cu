// The launch of attention for one token with norm, rotation and store.
#include "core/cuda/check.h"
#include "core/cuda/launch_cluster.h"
#include "core/error.h"
#include "ops/attention/token.cuh"
#include "ops/kernel_groups.h"

namespace dyno::ops {
namespace {

template <int kHead, bool kBf16>
void start_kernel(const DirectTask& task, int cluster_blocks, CudaStream& stream) {
  constexpr size_t kBytes = sizeof(token::Shared<kHead>);
  const dim3 grid(1, static_cast<unsigned>(task.common.kv_heads), static_cast<unsigned>(task.common.splits));
  if (cluster_blocks == 0) {
    return launch_dependent("rope_attention", token::token_kernel<kHead, kBf16, 0>, grid, token::kThreads, kBytes,
                            stream.handle, task);
  }
  const auto in_clusters = [&]<int kMost>() {
    constexpr size_t kSent = sizeof(token::Sent<kHead, kMost>);
    static_assert(kBytes + kSent <= 48 * 1024 && kBytes % 16 == 0, "what a block may have unasked, and how it lies");
    const auto kernel = token::token_kernel<kHead, kBf16, kMost>;
    if (kMost > kClusterBlocks) {
      DYNO_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
    launch_dependent_cluster("rope_attention", kernel, grid, token::kThreads, static_cast<unsigned>(cluster_blocks),
                             kBytes + kSent, stream.handle, task);
  };
  if (cluster_blocks == kClusterBlocks) return in_clusters.template operator()<kClusterBlocks>();
  in_clusters.template operator()<kMostClusterBlocks>();
}

template <int kHead>
void start(const DirectTask& task, bool bf16, int cluster_blocks, CudaStream& stream) {
  if constexpr (!heads_built(kHead)) {
    throw_left_out(heads_of(kHead));
  } else {
    const auto start_type = bf16 ? start_kernel<kHead, true> : start_kernel<kHead, false>;
    start_type(task, cluster_blocks, stream);
  }
}

}  // namespace

void rope_attention_token_cuda(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int splits,
                               int cluster_blocks, CudaStream& stream) {
  const DirectTask task = rope_direct_task(args, desc, splits, stream);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  DYNO_CHECK(DeviceError, task.aligned && aligned(args.q) && aligned(args.k) && aligned(args.v) && aligned(args.out),
             "[rope_attention] token: q, k, v, out and all rows of the cache (", args.k_row_bytes, " and ",
             args.v_row_bytes, " bytes) must start at multiples of 16 bytes");
  const bool bf16 = desc.k_type == DType::bf16;
  const auto start_head = desc.dk == 64 ? start<64> : start<128>;
  start_head(task, bf16, cluster_blocks, stream);
}

}  // namespace dyno::ops
