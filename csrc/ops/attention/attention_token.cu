// The launch of attention for one token with norm, rotation and store.
#include "core/cuda/common_shared.h"
#include "core/error.h"
#include "ops/attention/adaptive.h"
#include "ops/attention/token.cuh"
#include "ops/kernel_groups.h"

namespace dyno::ops {
namespace {

template <int kHead, bool kBf16>
void start_kernel(const DirectTask& task, bool clusters, CudaStream& stream) {
  constexpr size_t kBytes = sizeof(token::Shared<kHead>), kSent = sizeof(token::Sent<kHead>);
  static_assert(kBytes + kSent <= 48 * 1024 && kBytes % 16 == 0, "what a block may have unasked, and how it lies");
  const dim3 grid(1, static_cast<unsigned>(task.common.kv_heads), static_cast<unsigned>(task.common.splits));
  const auto kernel = clusters ? token::token_kernel<kHead, kBf16, true> : token::token_kernel<kHead, kBf16, false>;
  launch_dependent_common("rope_attention", kernel, grid, token::kThreads, clusters ? kClusterBlocks : 1,
                          clusters ? kBytes + kSent : kBytes, stream.handle, true, task);
}

template <int kHead>
void start(const DirectTask& task, bool bf16, bool clusters, CudaStream& stream) {
  if constexpr (!heads_built(kHead)) {
    throw_left_out(heads_of(kHead));
  } else {
    bf16 ? start_kernel<kHead, true>(task, clusters, stream) : start_kernel<kHead, false>(task, clusters, stream);
  }
}

}  // namespace

void rope_attention_token_cuda(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int splits, bool clusters,
                               CudaStream& stream) {
  const int joined = clusters ? kClusterBlocks : 1;  // splits whose results are one part
  const LaunchShape shape = launch_shape(desc.attention(), args.attention());
  const int parts = parts_of_keys(shape, splits / joined, joined * kDirectWarps * direct::kTileKeys);
  const DirectTask task = rope_direct_task(args, desc, parts * joined, stream);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  DYNO_CHECK(DeviceError, task.aligned && aligned(args.q) && aligned(args.k) && aligned(args.v) && aligned(args.out),
             "[rope_attention] token: q, k, v, out and all rows of the cache (", args.k_row_bytes, " and ",
             args.v_row_bytes, " bytes) must start at multiples of 16 bytes");
  const bool bf16 = desc.k_type == DType::bf16;
  desc.dk == 64 ? start<64>(task, bf16, clusters, stream) : start<128>(task, bf16, clusters, stream);
  if (parts == 1) return;
  const auto add =
      clusters ? add_parts<kTokenRows, token::TokenParts<true>> : add_parts<kTokenRows, token::TokenParts<false>>;
  add("rope_attention", task.common, 1, stream.handle);
}

}  // namespace dyno::ops
