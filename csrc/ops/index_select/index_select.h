// Family index_select: the positions that sparse attention reads, as an indexer chooses them (arXiv:2512.02556).
#pragma once

#include "ops/args.h"
#include "ops/cpu_context.h"
#include "ops/cuda_stream.h"
#include "ops/op.h"

namespace dyno::ops {

// score(t, s) = sum over heads of weight[t, head] * max(0, q[t, head] · k[s]) for the positions s <= t of the sequence.
// out[t] has the `selected` positions with the highest scores, in ascending order. Of equal scores, the lower position
// comes first; NaN counts as the lowest score. A token that sees fewer positions gets all of them, and -1 after them.
struct IndexSelectDesc {
  int64_t m = 1, heads = 1, dk = 0, selected = 0;
  friend bool operator==(const IndexSelectDesc&, const IndexSelectDesc&) = default;
};

struct IndexSelectArgs {
  const float* q = nullptr;        // [m, heads, dk]
  int64_t q_stride = 0;            // between tokens, as the next ones
  const float* weights = nullptr;  // [m, heads]
  int64_t weights_stride = 0;
  const std::byte* keys = nullptr;  // [slots, ctx, dk] f32, including the keys of the batch
  int64_t key_row_bytes = 0;
  int64_t slot_positions = 0;  // ctx
  const SequenceRun* runs = nullptr;
  int32_t n_runs = 0;
  int32_t* out = nullptr;  // [m, selected]
  int64_t out_stride = 0;
};

std::span<const VariantInfo> index_select_variants();
std::string op_key(const IndexSelectDesc& desc);
std::vector<Config> candidates(const IndexSelectDesc& desc, const DeviceInfo& device, CandidateSet set);
Config default_config(const IndexSelectDesc& desc, const DeviceInfo& device);
Support supports(const IndexSelectDesc& desc, const Config& config, const DeviceInfo& device);
Cost cost(const IndexSelectDesc& desc);
size_t scratch_bytes(const IndexSelectDesc& desc, const Config& config);
// Throws PlanError for runs outside the batch or the cache.
void launch(const Config& config, const IndexSelectDesc& desc, const IndexSelectArgs& args, CpuContext& context);
void launch(const Config& config, const IndexSelectDesc& desc, const IndexSelectArgs& args, CudaStream& stream);

}  // namespace dyno::ops
