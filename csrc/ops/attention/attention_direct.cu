// The launch of direct attention, alone or with norm, rotation and store: selects the instance.
#include "ops/attention/adaptive.h"
#include "ops/attention/direct.cuh"
#include "ops/kernel_groups.h"

namespace dyno::ops {

// The types of keys and values, query rows of a block.
using LaunchDirect = void(const DirectTask&, device::Scalar, device::Scalar, int, const dim3&, CUstream_st*);
LaunchDirect direct_attention_64_false, direct_attention_64_true;
LaunchDirect direct_attention_128_false, direct_attention_128_true;
LaunchDirect direct_attention_256_false, direct_attention_256_true;
LaunchDirect direct_attention_512_false;

namespace {

DirectTask task_of(const AttentionArgs& args, const AttentionDesc& desc, int splits, CudaStream& stream) {
  DirectTask task{};
  task.common = make_cuda_attention(args, desc, splits, stream);
  const auto whole = [](uintptr_t bytes, const void* cache, int64_t row, int64_t head = 0) {
    return (reinterpret_cast<uintptr_t>(cache) | static_cast<uintptr_t>(row) | static_cast<uintptr_t>(head)) % bytes ==
           0;
  };
  const CudaAttention& t = task.common;
  task.aligned =
      (desc.k_type == DType::q8_0 || whole(16, args.k_cache, args.k_row_bytes, t.k_head_bytes)) &&
      (desc.v_in_k || desc.v_type == DType::q8_0 || whole(16, args.v_cache, args.v_row_bytes, t.v_head_bytes));
  // The heads of a q8_0 cache that is staged are read from the last 16-byte address before them.
  const int head = direct_head(desc.dk > desc.dv ? desc.dk : desc.dv);
  task.staged = task.aligned && desc.dk == head && desc.dv == head &&
                (desc.k_type != DType::q8_0 || whole(16, args.k_cache, args.k_row_bytes)) &&
                (desc.v_in_k || desc.v_type != DType::q8_0 || whole(16, args.v_cache, args.v_row_bytes));
  task.early = args.settled && whole(32, args.k_cache, args.k_row_bytes) &&
               (desc.v_in_k || whole(32, args.v_cache, args.v_row_bytes));
  return task;
}

device::Scalar scalar_of(DType type) {
  return type == DType::bf16 ? device::Scalar::bf16 : type == DType::q8_0 ? device::Scalar::q8_0 : device::Scalar::f16;
}

void start(const DirectTask& task, const AttentionDesc& desc, bool fused, int most_rows, CudaStream& stream) {
  const LaunchShape shape = launch_shape(desc, task.common.args);
  const int rows = direct_rows(shape, most_rows);
  const auto keys = scalar_of(desc.k_type), values = desc.v_in_k ? keys : scalar_of(desc.v_type);
  const int head = direct_head(desc.dk > desc.dv ? desc.dk : desc.dv);
  // Chips without asynchronous copies, or whose shared memory is too small, load rows of q8_0 directly.
  DirectTask chosen = task;
  const int caches = (desc.k_type == DType::q8_0) + ((desc.v_in_k ? desc.k_type : desc.v_type) == DType::q8_0);
  const size_t shared =
      direct_shared_bytes(head, rows, caches) + (fused ? direct_fresh_bytes(head, rows) : 0) + kDirectStaticBytes;
  chosen.staged = task.staged && stream.device->compute_capability >= 80 &&
                  shared <= static_cast<size_t>(stream.device->shared_per_block_bytes);
  const auto choose = [&]() -> LaunchDirect* {
    switch (head) {
      case 64:
        if constexpr (heads_built(64)) return fused ? direct_attention_64_true : direct_attention_64_false;
        break;
      case 128:
        if constexpr (heads_built(128)) return fused ? direct_attention_128_true : direct_attention_128_false;
        break;
      case 256:
        if constexpr (heads_built(256)) return fused ? direct_attention_256_true : direct_attention_256_false;
        break;
      case 512:
        if constexpr (heads_built(512)) return direct_attention_512_false;  // never fused, see rope_attention
        break;
    }
    throw_left_out(heads_of(head));
  };
  chosen.common.splits = parts_of_keys(shape, task.common.splits, direct_block_tiles(head) * direct::kTileKeys);
  const dim3 grid(static_cast<unsigned>(shape.tiles(rows)), static_cast<unsigned>(desc.kv_heads),
                  static_cast<unsigned>(chosen.common.splits));
  choose()(chosen, keys, values, rows, grid, stream.handle);
}

}  // namespace

FreshRows make_fresh_rows(const RopeAttentionArgs& args, const RopeAttentionDesc& desc) {
  return {.k = args.k,
          .v = args.v,
          .k_stride = args.k_stride,
          .v_stride = args.v_stride,
          .q_norm = args.q_norm,
          .k_norm = args.k_norm,
          .norms_q = desc.q_norm,
          .norms_k = desc.k_norm,
          .norms_v = desc.v_norm,
          .eps = args.eps,
          .inv_freq = args.inv_freq,
          .mscale = args.mscale,
          .n_rot = static_cast<int>(desc.n_rot),
          .neox = desc.neox,
          .k_cache = reinterpret_cast<uint8_t*>(args.k_cache),
          .v_cache = reinterpret_cast<uint8_t*>(args.v_cache),
          .q_rotary = nullptr,
          .q_rotary_stride = 0,
          .q_rotary_head = 0};
}

void attention_direct_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, int splits,
                           CudaStream& stream) {
  if (splits == 1 && attention_steps_cuda(args, desc, stream)) return;
  start(task_of(args, desc, splits, stream), desc, false, rows, stream);
}

bool attention_steps_cuda(const AttentionArgs& args, const AttentionDesc& desc, CudaStream& stream) {
  const bool halves = desc.k_type == DType::f16 || desc.k_type == DType::bf16;
  if (args.n_runs != desc.m || !halves || desc.v_in_k || desc.v_type != desc.k_type) return false;
  const DirectTask task = task_of(args, desc, 1, stream);
  if (!steps_attention_takes(task)) return false;
  steps_attention(task, desc.k_type == DType::bf16, desc.out_tiles, stream.handle);
  return true;
}

DirectTask rope_direct_task(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int splits,
                            CudaStream& stream) {
  DirectTask task = task_of(args.attention(), desc.attention(), splits, stream);
  task.fresh = make_fresh_rows(args, desc);
  return task;
}

void rope_attention_direct_cuda(const RopeAttentionArgs& args, const RopeAttentionDesc& desc, int rows, int splits,
                                CudaStream& stream) {
  start(rope_direct_task(args, desc, splits, stream), desc.attention(), true, rows, stream);
}

}  // namespace dyno::ops
