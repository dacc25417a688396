// Flash attention for prompts on Hopper: products by wgmma, with one warpgroup that only loads and two that only
// compute.
//
// The loading warpgroup fills stages of keys and of values in shared memory, each guarded by a pair of barriers (full,
// empty). A computing warpgroup has 64 query rows. It starts the scores of the next keys, then the weighted values of
// the last ones, and computes the next weights while the latter run (FlashAttention-3, arXiv:2407.08608, section 3).
//   kRowGroups = 2: the two have different rows and share every block of keys. They take turns in starting
//                   products, so that the exponentials of one run during the products of the other.
//   kRowGroups = 1: both have the same rows and process alternating blocks of keys; their results are combined at
//                   the end.
//
// Heads are padded with zeros to kDk and kDv. The order of sums depends only on the shapes.
#pragma once

#include "device/dependent.cuh"
#include "device/mbarrier.cuh"
#include "device/wgmma_flash.cuh"
#include "ops/attention/flash_load.cuh"
#include "ops/attention/flash_rows.cuh"

namespace dyno::ops {

template <int kDk, int kDv, int kRowGroups>
struct FlashWgmma {
  static constexpr int kRows = 64 * kRowGroups;
  static constexpr int kKeys = flash_wgmma_keys(kDk, kRowGroups);
  static constexpr int kStages = flash_wgmma_stages(kDk, kRowGroups);
  static constexpr int kThreads = 384;
  static constexpr uint32_t kQueryPanel = kRows * 128, kKeyPanel = kKeys * 128;  // bytes of 64 columns
  static constexpr uint32_t kQueryBytes = kQueryPanel * (kDk / 64);
  static constexpr uint32_t kKeyBytes = kKeyPanel * (kDk / 64), kStageBytes = kKeyPanel * ((kDk + kDv) / 64);
  static constexpr uint32_t kBarriers = kQueryBytes + kStages * kStageBytes;    // their offset
  static constexpr uint32_t kSharedBytes = kBarriers + kStages * 4 * 8 + 1024;  // and padding to align the start
};

#ifdef DYNO_DEVICE_WGMMA

// The products of a computing warpgroup with one f16 or bf16 number for each value.
template <int kDk, int kDv, bool kBf16, int kRowGroups>
struct WgmmaRows : FlashRows<flash_wgmma_keys(kDk, kRowGroups), kDv> {
  using Shape = FlashWgmma<kDk, kDv, kRowGroups>;
  static constexpr int kKeys = Shape::kKeys;
  using Base = FlashRows<kKeys, kDv>;
  using Base::Base, Base::scores, Base::sums;

  uint32_t weights[kKeys / 16][4];

  __device__ __forceinline__ void start_scores(uint32_t queries, uint32_t keys) {
    device::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kDk / 16; ++s) {
      const uint64_t a = device::wgmma_descriptor(queries + s / 4 * Shape::kQueryPanel + s % 4 * 32);
      const uint64_t b = device::wgmma_descriptor(keys + s / 4 * Shape::kKeyPanel + s % 4 * 32);
      device::wgmma_scores<kBf16>(scores, a, b, s != 0);
    }
    device::wgmma_commit();
  }
  __device__ __forceinline__ void start_values(uint32_t values) {
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      device::wgmma_values<kBf16>(sums, weights[k],
                                  device::wgmma_descriptor_transposed(values + k * 2048, Shape::kKeyPanel));
    }
    device::wgmma_commit();
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        weights[k][j] = device::pack2<kBf16>(scores[8 * k + 2 * j], scores[8 * k + 2 * j + 1]);
    }
  }
};

#endif  // DYNO_DEVICE_WGMMA

template <int kDk, int kDv, bool kBf16, int kRowGroups>
__global__ void __launch_bounds__(384, 1) flash_wgmma_kernel(const __grid_constant__ FlashTask task) {
#ifdef DYNO_DEVICE_WGMMA
  device::wait_for_previous();
  using Shape = FlashWgmma<kDk, kDv, kRowGroups>;
  constexpr int kKeys = Shape::kKeys, kStages = Shape::kStages;
  const CudaAttention& t = task.common;
  const int kv_head = blockIdx.x, tile_index = blockIdx.y, split = blockIdx.z, group = threadIdx.x / 128 - 1;
  const CudaTile tile = find_tile(t, tile_index, Shape::kRows);
  if (tile.empty()) return;
  const KeyRange range = split_keys(t, tile, split, flash_split_step(kKeys));
  if (split >= range.active) return;
  const int blocks = (range.end - range.begin + kKeys - 1) / kKeys;

  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const uint32_t base = device::shared_address(shared);
  const auto key_stage = [&](int block) { return base + Shape::kQueryBytes + block % kStages * Shape::kStageBytes; };
  const auto value_stage = [&](int block) { return key_stage(block) + Shape::kKeyBytes; };
  // Full and empty barriers of keys, then of values.
  const auto barrier = [&](int which, int block) {
    return base + Shape::kBarriers + (which * kStages + block % kStages) * 8;
  };
  const auto parity = [&](int block) { return block / kStages & 1; };
  constexpr int kFullKeys = 0, kEmptyKeys = 1, kFullValues = 2, kEmptyValues = 3;
  if (threadIdx.x < 4 * kStages) {
    // All loading threads arrive at full barriers, and one lane of each reading warp at empty ones.
    const int which = threadIdx.x / kStages;
    device::barrier_init(barrier(which, threadIdx.x % kStages), which % 2 == 0 ? 128 : 4 * kRowGroups);
  }
  __syncthreads();  // barriers are initialised

  if (group < 0) {
    device::fewer_registers<40>();
    const uint8_t* key_base = key_rows(t, tile.run, kv_head);
    const uint8_t* value_base = value_rows(t, tile.run, kv_head);
    const int64_t value_stride = t.v_in_k ? t.args.k_row_bytes : t.args.v_row_bytes;
    for (int block = 0; block < blocks; ++block) {
      const int first = range.begin + block * kKeys, count = range.end - first;
      device::barrier_wait(barrier(kEmptyKeys, block), parity(block) ^ 1);
      load_panels<kDk, kBf16, kKeys>(key_stage(block), key_base + first * t.args.k_row_bytes, t.args.k_row_bytes,
                                     task.k_type, task.aligned, t.dk, count, barrier(kFullKeys, block));
      device::barrier_wait(barrier(kEmptyValues, block), parity(block) ^ 1);
      load_panels<kDv, kBf16, kKeys>(value_stage(block), value_base + first * value_stride, value_stride, task.v_type,
                                     task.aligned, t.dv, count, barrier(kFullValues, block));
    }
    device::copy_async_wait<0>();
  } else {
    device::more_registers<232>();
    load_queries<kDk, kBf16, Shape::kRows>(t, tile, kv_head, base, threadIdx.x - 128);
    device::fence_async_shared();
    device::named_sync(kMeet, kConsumers);  // queries are written

    const int row_offset = kRowGroups == 2 ? 64 * group : 0;
    const uint32_t queries = base + row_offset * 128;
    WgmmaRows<kDk, kDv, kBf16, kRowGroups> rows(t, tile, row_offset, range.end);
    constexpr int kStep = kRowGroups == 2 ? 1 : 2;
    const int start = kRowGroups == 2 ? 0 : group;
    const auto wait_full = [&](int which, int block) {
      device::barrier_wait(barrier(which, block), parity(block));
      device::fence_async_shared();
    };
    const auto release = [&](int which, int block) {
      if (threadIdx.x % 32 == 0) device::barrier_arrive(barrier(which, block));
    };
    if (start < blocks) {
      wait_full(kFullKeys, start);
      rows.start_scores(queries, key_stage(start));
      device::wgmma_wait<0>();
      hold_registers(rows.scores);
      release(kEmptyKeys, start);
      rows.softmax(range.begin + start * kKeys);
      rows.pack_weights();
      int block = start;
      if (kRowGroups == 2 && group == 1 && blocks > 1) device::named_arrive(kTurn, kConsumers);  // the first one starts
      for (int next = start + kStep; next < blocks; block = next, next += kStep) {
        wait_full(kFullKeys, next);
        if constexpr (kRowGroups == 2) device::named_sync(kTurn + group, kConsumers);
        rows.start_scores(queries, key_stage(next));
        wait_full(kFullValues, block);
        rows.start_values(value_stage(block));
        if constexpr (kRowGroups == 2) {
          // After the last turn, nobody waits.
          if (group == 0 || next + 1 < blocks) device::named_arrive(kTurn + (group ^ 1), kConsumers);
        }
        device::wgmma_wait<1>();
        hold_registers(rows.scores);
        release(kEmptyKeys, next);
        rows.softmax(range.begin + next * kKeys);
        device::wgmma_wait<0>();
        hold_registers(rows.sums);
        release(kEmptyValues, block);
        rows.shrink_sums();
        rows.pack_weights();
      }
      wait_full(kFullValues, block);
      rows.start_values(value_stage(block));
      device::wgmma_wait<0>();
      hold_registers(rows.sums);
    }
    rows.finish();
    if constexpr (kRowGroups == 1) rows.merge(reinterpret_cast<float*>(shared + Shape::kQueryBytes), group);
    const bool whole = range.active == 1;
    if (kRowGroups == 2 || group == 0) rows.store(tile, row_offset, kv_head, split, whole);
  }
#endif
}

}  // namespace dyno::ops
