// The launch of attention for one token of each of many sequences.
#include "core/cuda/launch.h"
#include "ops/attention/steps.cuh"
#include "ops/kernel_groups.h"

namespace dyno::ops {
namespace {

template <int kHead, bool kBf16>
void start_kernel(const DirectTask& task, int64_t tiles, CUstream_st* stream) {
  constexpr size_t kBytes = sizeof(steps::Shared<kHead>);
  static_assert(kBytes <= 48 * 1024, "what a block may have unasked");
  const dim3 grid(static_cast<unsigned>(task.common.args.n_runs), static_cast<unsigned>(task.common.kv_heads));
  if (tiles == 0) {
    launch_dependent("attention", steps::steps_kernel<kHead, kBf16>, grid, 32 * steps::kWarps, kBytes, stream, task);
  } else {
    launch_dependent("attention", steps::steps_tiles_kernel<kHead, kBf16>, grid, 32 * steps::kWarps, kBytes, stream,
                     task, static_cast<int>(tiles));
  }
}

template <int kHead>
void start(const DirectTask& task, bool bf16, int64_t tiles, CUstream_st* stream) {
  if constexpr (!heads_built(kHead)) {
    throw_left_out(heads_of(kHead));
  } else {
    bf16 ? start_kernel<kHead, true>(task, tiles, stream) : start_kernel<kHead, false>(task, tiles, stream);
  }
}

}  // namespace

bool steps_attention_takes(const DirectTask& task) {
  const CudaAttention& t = task.common;
  const auto aligned = [](const void* p, int64_t stride) {
    return (reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(stride * 4)) % 16 == 0;
  };
  return t.args.n_runs == t.tokens && t.splits == 1 && t.group <= steps::kRows && t.dk == t.dv &&
         (t.dk == 64 || t.dk == 128) && !t.softcap && !t.v_in_k && task.aligned && aligned(t.args.q, t.args.q_stride) &&
         aligned(t.args.out, t.args.out_stride);
}

void steps_attention(const DirectTask& task, bool bf16, int64_t tiles, CUstream_st* stream) {
  task.common.dk == 64 ? start<64>(task, bf16, tiles, stream) : start<128>(task, bf16, tiles, stream);
}

}  // namespace dyno::ops
