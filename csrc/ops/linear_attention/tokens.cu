// Linear attention token by token, with the state in registers.
#include "core/cuda/launch.h"
#include "device/dependent.cuh"
#include "ops/linear_attention/state_tile.cuh"

namespace dyno::ops {
namespace {

template <int kDk>
__global__ void __launch_bounds__(linear::kThreads) tokens_kernel(LinearAttentionArgs args, LinearAttentionDesc desc) {
  __shared__ __align__(16) float memory[linear::kTokenFloats<kDk>];
  device::let_next_start();
  device::wait_for_previous();
  const SequenceRun run = args.runs[blockIdx.z];
  if (run.n_tokens == 0) return;
  const linear::Head head(args, desc, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x) * linear::kColumns);
  linear::StateTile<kDk> tile;
  tile.load(head, run);
  linear::tokens(head, run.first_token, run.n_tokens, tile, memory);
  tile.store(head, run);
}

}  // namespace

void linear_attention_tokens(const LinearAttentionArgs& args, const LinearAttentionDesc& desc, CudaStream& stream) {
  if (args.n_runs == 0) return;
  const dim3 grid(static_cast<unsigned>((desc.dv + linear::kColumns - 1) / linear::kColumns),
                  static_cast<unsigned>(desc.v_heads), static_cast<unsigned>(args.n_runs));
  const auto go = [&](auto kernel) {
    launch_dependent("linear_attention", kernel, grid, linear::kThreads, 0, stream.handle, args, desc);
  };
  if (desc.dk <= 64) return go(tokens_kernel<64>);
  if (desc.dk <= 128) return go(tokens_kernel<128>);
  if (desc.dk <= 256) return go(tokens_kernel<256>);
  go(tokens_kernel<512>);
}

}  // namespace dyno::ops
