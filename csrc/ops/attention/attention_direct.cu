// The launch of direct attention: which instance, and how the cache lies.
#include "ops/attention/direct.cuh"

namespace dyno::ops {

#define DYNO_DIRECT_HEAD(head) \
  void direct_attention_##head(const DirectTask&, device::Scalar, int, const dim3&, CUstream_st*);
DYNO_DIRECT_HEAD(64)
DYNO_DIRECT_HEAD(128)
DYNO_DIRECT_HEAD(256)
#undef DYNO_DIRECT_HEAD

void attention_direct_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, int splits,
                           CudaStream& stream) {
  DirectTask task{};
  task.common = make_cuda_attention(args, desc, splits, stream);
  const auto aligned = [&](uintptr_t bytes) {
    const auto whole = [&](const void* cache, int64_t row) {
      return (reinterpret_cast<uintptr_t>(cache) | static_cast<uintptr_t>(row)) % bytes == 0;
    };
    return whole(args.k_cache, args.k_row_bytes) && (desc.v_in_k || whole(args.v_cache, args.v_row_bytes));
  };
  task.aligned = aligned(16);
  task.early = args.settled && aligned(32);
  const AttentionTiles tiles{rows, task.common.group};
  const dim3 grid(static_cast<unsigned>(tiles.bound(desc.m, args.n_runs)), static_cast<unsigned>(desc.kv_heads),
                  static_cast<unsigned>(splits));
  const auto type = desc.k_type == DType::bf16   ? device::Scalar::bf16
                    : desc.k_type == DType::q8_0 ? device::Scalar::q8_0
                                                 : device::Scalar::f16;
  switch (direct_head(desc.dk > desc.dv ? desc.dk : desc.dv)) {
    case 64:
      return direct_attention_64(task, type, rows, grid, stream.handle);
    case 128:
      return direct_attention_128(task, type, rows, grid, stream.handle);
    default:
      return direct_attention_256(task, type, rows, grid, stream.handle);
  }
}

}  // namespace dyno::ops
