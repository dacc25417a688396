// The launch of flash attention: selects the instance.
#include "core/error.h"
#include "ops/attention/flash_launch.cuh"
#include "ops/kernel_groups.h"

namespace dyno::ops {

#define DYNO_FLASH_HEAD(head) void flash_attention_##head(const FlashTask&, int, bool, const FlashGrid&, CUstream_st*);
DYNO_FLASH_HEAD(64)
DYNO_FLASH_HEAD(128)
DYNO_FLASH_HEAD(192)
DYNO_FLASH_HEAD(256)
#undef DYNO_FLASH_HEAD
#define DYNO_FLASH_WGMMA(head) void flash_wgmma_##head(const FlashTask&, int, bool, const FlashGrid&, CUstream_st*);
DYNO_FLASH_WGMMA(64)
DYNO_FLASH_WGMMA(128)
DYNO_FLASH_WGMMA(192)
DYNO_FLASH_WGMMA(256)
DYNO_FLASH_WGMMA(512)
#undef DYNO_FLASH_WGMMA
#define DYNO_FLASH_PAIRS(head) void flash_pairs_##head(const FlashTask&, int, const FlashGrid&, CUstream_st*);
DYNO_FLASH_PAIRS(64)
DYNO_FLASH_PAIRS(128)
DYNO_FLASH_PAIRS(192)
#undef DYNO_FLASH_PAIRS
#define DYNO_FLASH_PAIRS(head) void flash_wgmma_pairs_##head(const FlashTask&, const FlashGrid&, CUstream_st*);
DYNO_FLASH_PAIRS(64)
DYNO_FLASH_PAIRS(128)
DYNO_FLASH_PAIRS(192)
#undef DYNO_FLASH_PAIRS

// A case of a switch over the sizes to which heads are padded, if this build has kernels for it.
#define DYNO_HEAD_CASE(size, launch)                \
  case size:                                        \
    if constexpr (heads_built(size)) return launch; \
    break;

namespace {

int scalar_of(DType type) {
  switch (type) {
    case DType::bf16:
      return static_cast<int>(device::Scalar::bf16);
    case DType::q8_0:
      return static_cast<int>(device::Scalar::q8_0);
    default:
      return static_cast<int>(device::Scalar::f16);
  }
}

bool aligned(const void* pointer, int64_t row_bytes, int64_t head_bytes) {
  return (reinterpret_cast<uintptr_t>(pointer) | static_cast<uint64_t>(row_bytes | head_bytes)) % 16 == 0;
}

}  // namespace

static FlashTask make_task(const AttentionArgs& args, const AttentionDesc& desc, int splits, CudaStream& stream) {
  FlashTask task{};
  task.common = make_cuda_attention(args, desc, splits, stream);
  task.k_type = scalar_of(desc.k_type);
  task.v_type = desc.v_in_k ? task.k_type : scalar_of(desc.v_type);
  task.aligned = aligned(args.k_cache, args.k_row_bytes, task.common.k_head_bytes) &&
                 (desc.v_in_k ? desc.dv % 8 == 0 : aligned(args.v_cache, args.v_row_bytes, task.common.v_head_bytes));
  return task;
}

static FlashGrid make_grid(const AttentionArgs& args, const AttentionDesc& desc, int64_t rows, int splits) {
  const AttentionTiles tiles{rows, desc.heads / desc.kv_heads};
  return {static_cast<unsigned>(tiles.bound(desc.m, args.n_runs)), static_cast<unsigned>(desc.kv_heads),
          static_cast<unsigned>(splits)};
}

void attention_flash_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, CudaStream& stream) {
  if constexpr (!variant_compiled("flash", kNoTypeBit)) {
    throw_left_out("flash", desc.k_type, {static_cast<int16_t>(rows)});
  } else {
    const FlashTask task = make_task(args, desc, 1, stream);
    const FlashGrid grid = make_grid(args, desc, rows, 1);
    const bool bf16 = flash_in_bf16(desc);
    const int head = flash_head(desc.dk, desc.dv);
    switch (head) {
      DYNO_HEAD_CASE(64, flash_attention_64(task, rows, bf16, grid, stream.handle))
      DYNO_HEAD_CASE(128, flash_attention_128(task, rows, bf16, grid, stream.handle))
      DYNO_HEAD_CASE(192, flash_attention_192(task, rows, bf16, grid, stream.handle))
      DYNO_HEAD_CASE(256, flash_attention_256(task, rows, bf16, grid, stream.handle))
    }
    throw_left_out(heads_of(head));
  }
}

namespace {

constexpr int kCombineWarps = 4;

// A warp adds the parts of row blockIdx.z * kCombineWarps + its number, four dimensions in a lane at a time.
__global__ void __launch_bounds__(32 * kCombineWarps)
    flash_combine(const __grid_constant__ FlashTask task, const int tile_rows, const int step) {
  device::let_next_start();
  device::wait_for_previous();
  const CudaAttention& t = task.common;
  const int kv_head = blockIdx.x, lane = threadIdx.x % 32;
  const int row = blockIdx.z * kCombineWarps + threadIdx.x / 32;
  const CudaTile tile = find_tile(t, blockIdx.y, tile_rows);
  if (row >= tile.rows()) return;
  const int active = split_keys(t, tile, 0, step).active;
  if (active == 1) return;  // written directly
  const float* first = batch_partial_row(t, tile, kv_head, 0, row);
  const int64_t distance = batch_partial_row(t, tile, kv_head, 1, row) - first;
  const float* mine = first + lane * distance;
  const float top = lane < active ? __ldcg(mine) : minus_infinity();
  const float part_total = lane < active ? __ldcg(mine + 1) : 0.0f;
  const float best = device::warp_max(top);
  const float weight = top == minus_infinity() ? 0.0f : expf(top - best);
  const float total = device::warp_sum(part_total * weight);
  const float factor = output_factor(t, tile.row_begin + row, kv_head, best, total);
  float* out = output_row(t, tile, tile.row_begin + row, kv_head);
  for (int base = 0; base < t.dv; base += 128) {
    float sum[4] = {};
#pragma unroll 4
    for (int s = 0; s < active; ++s) {
      const float w = __shfl_sync(device::kFullMask, weight, s);
      const float* part = first + s * distance + 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int d = base + 32 * i + lane;
        const float value = d < t.dv ? __ldcg(part + d) : 0.0f;
        if (w != 0.0f) sum[i] += value * w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = base + 32 * i + lane;
      if (d < t.dv) out[d] = sum[i] * factor;
    }
  }
}

}  // namespace

void launch_flash_combine(const FlashTask& task, const FlashGrid& grid, int rows, int step, CUstream_st* stream) {
  if (grid.splits == 1) return;
  const auto pieces = static_cast<unsigned>((rows + kCombineWarps - 1) / kCombineWarps);
  launch_dependent("attention", flash_combine, dim3(grid.kv_heads, grid.tiles, pieces), 32 * kCombineWarps, 0, stream,
                   task, rows, step);
}

void attention_flash_wgmma_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, int splits,
                                CudaStream& stream) {
  const FlashTask task = make_task(args, desc, splits, stream);
  const FlashGrid grid = make_grid(args, desc, rows, splits);
  const bool bf16 = flash_in_bf16(desc);
  const int head = flash_head(desc.dk, desc.dv);
  switch (head) {
    DYNO_HEAD_CASE(64, flash_wgmma_64(task, rows, bf16, grid, stream.handle))
    DYNO_HEAD_CASE(128, flash_wgmma_128(task, rows, bf16, grid, stream.handle))
    DYNO_HEAD_CASE(192, flash_wgmma_192(task, rows, bf16, grid, stream.handle))
    DYNO_HEAD_CASE(256, flash_wgmma_256(task, rows, bf16, grid, stream.handle))
    DYNO_HEAD_CASE(512, flash_wgmma_512(task, rows, bf16, grid, stream.handle))
  }
  throw_left_out(heads_of(head));
}

void attention_flash_pairs_cuda(const AttentionArgs& args, const AttentionDesc& desc, int rows, int splits,
                                CudaStream& stream) {
  FlashTask task{};
  task.common = make_cuda_attention(args, desc, splits, stream);
  task.k_type = task.v_type = static_cast<int>(device::Scalar::f32);
  task.aligned = desc.dk % 8 == 0 && desc.dv % 8 == 0 &&
                 aligned(args.k_cache, args.k_row_bytes, task.common.k_head_bytes) &&
                 (desc.v_in_k || aligned(args.v_cache, args.v_row_bytes, task.common.v_head_bytes));
  const FlashGrid grid = make_grid(args, desc, rows, splits);
  const int head = flash_head(desc.dk, desc.dv);
  switch (head) {
    DYNO_HEAD_CASE(64, flash_pairs_64(task, rows, grid, stream.handle))
    DYNO_HEAD_CASE(128, flash_pairs_128(task, rows, grid, stream.handle))
    DYNO_HEAD_CASE(192, flash_pairs_192(task, rows, grid, stream.handle))
  }
  throw_left_out(heads_of(head));
}

void attention_flash_wgmma_pairs_cuda(const AttentionArgs& args, const AttentionDesc& desc, int splits,
                                      CudaStream& stream) {
  FlashTask task{};
  task.common = make_cuda_attention(args, desc, splits, stream);
  DYNO_CHECK(DeviceError,
             aligned(args.k_cache, args.k_row_bytes, task.common.k_head_bytes) &&
                 aligned(args.v_cache, args.v_row_bytes, task.common.v_head_bytes),
             "[attention] pairs of keys and values are not aligned to 16 bytes");
  const FlashGrid grid = make_grid(args, desc, kFlashWgmmaPairsRows, splits);
  const int head = flash_head(desc.dk, desc.dv);
  switch (head) {
    DYNO_HEAD_CASE(64, flash_wgmma_pairs_64(task, grid, stream.handle))
    DYNO_HEAD_CASE(128, flash_wgmma_pairs_128(task, grid, stream.handle))
    DYNO_HEAD_CASE(192, flash_wgmma_pairs_192(task, grid, stream.handle))
  }
  throw_left_out(heads_of(head));
}

}  // namespace dyno::ops
