// Flash attention over f16 pairs on Hopper: the products of flash_pairs.cuh by wgmma, with one warpgroup that only
// loads and two that only compute. mla_expand writes keys and values as pairs, so that no block has to split them
// again.
//
// A computing warpgroup has 64 query rows, and both share every block of keys. Queries q = h + l and keys k = h' + l'
// give three products: h·h' in one sum, h·l' and l·h' in others, because l and l' are multiplied by kRestScale. High
// parts and rests of keys are adjacent rows of a panel, so that one instruction multiplies h by both. Weighted values
// leave the tensor cores after each block of keys, because tensor cores truncate long sums.
#pragma once

#include "device/dependent.cuh"
#include "device/half_pairs.cuh"
#include "device/wgmma_flash.cuh"
#include "ops/attention/flash_load.cuh"
#include "ops/attention/flash_query_pairs.cuh"
#include "ops/attention/flash_rows.cuh"

namespace dyno::ops {

template <int kDk>
struct FlashWgmmaPairs {
  static constexpr int kDv = flash_value_head(kDk), kRows = kFlashWgmmaPairsRows, kKeys = kFlashWgmmaPairsKeys;
  static constexpr int kThreads = 384, kKeyStages = 2, kValueStages = kDk == 192 ? 1 : 2;
  static constexpr int kKeyPanels = kDk / 64, kValuePanels = kDv / 64;
  // Bytes of panels of 64 columns: queries and values have a plane of high parts, then one of rests; a panel of keys
  // has kKeys rows of high parts, then kKeys rows of rests.
  static constexpr uint32_t kQueryPanel = kRows * 128, kQueryPlane = kQueryPanel * kKeyPanels;
  static constexpr uint32_t kKeyRests = kKeys * 128, kKeyPanel = 2 * kKeyRests, kKeyBytes = kKeyPanel * kKeyPanels;
  static constexpr uint32_t kValuePanel = kKeys * 128, kValuePlane = kValuePanel * kValuePanels;
  static constexpr uint32_t kValueBytes = 2 * kValuePlane;
  static constexpr uint32_t kKeysAt = 2 * kQueryPlane, kValuesAt = kKeysAt + kKeyStages * kKeyBytes;
  static constexpr uint32_t kFactorsAt = kValuesAt + kValueStages * kValueBytes, kBarriersAt = kFactorsAt + kRows * 4;
  static constexpr int kBarriers = 2 * (kKeyStages + kValueStages);
  static constexpr uint32_t kSharedBytes = kBarriersAt + kBarriers * 8 + 1024;  // and padding to align the start
};

#ifdef DYNO_DEVICE_WGMMA

// Called by 128 threads: loads kFlashWgmmaPairsKeys rows of pairs, `width` numbers each, to panels at `to` that are
// `panel_bytes` apart; the rests `rests_at` bytes behind the high parts. Zeros from row `count` and column `width` on.
// Every thread arrives at `full` when its part is complete.
template <int kColumns>
__device__ __forceinline__ void load_pairs(uint32_t to, uint32_t panel_bytes, uint32_t rests_at, const uint8_t* rows,
                                           int64_t stride, int width, int count, uint32_t full) {
  const int thread = threadIdx.x % 128, chunk = thread % 8, row0 = thread / 8;
  to += row0 * 128 + ((chunk ^ (row0 & 7)) << 4);
#pragma unroll
  for (int i = 0; i < kFlashWgmmaPairsKeys / 16; ++i) {
    const int row = row0 + 16 * i;
    const uint8_t* from = rows + (row < count ? row : 0) * stride;
#pragma unroll
    for (int panel = 0; panel < kColumns / 64; ++panel) {
      const int column = panel * 64 + chunk * 8;
      const bool valid = row < count && column < width;
      const uint8_t* high = from + (valid ? column : 0) * 2;
      const uint32_t place = to + panel * panel_bytes + i * 2048;
      device::copy_async_16(place, high, valid);
      device::copy_async_16(place + rests_at, high + (valid ? width : 0) * 2, valid);
    }
  }
  device::barrier_arrive_copied(full);
}

inline constexpr int kPairWeightLog2 = 14;  // weights use the whole f16 range

template <int kDk>
struct PairRows : FlashRows<FlashWgmmaPairs<kDk>::kKeys, FlashWgmmaPairs<kDk>::kDv, kPairWeightLog2> {
  using Shape = FlashWgmmaPairs<kDk>;
  static constexpr int kKeys = Shape::kKeys, kSteps = kKeys / 16;
  using Base = FlashRows<kKeys, Shape::kDv, kPairWeightLog2>;
  using Base::Base, Base::scores, Base::sums, Base::shrink;

  uint32_t weights[kSteps][4], rests[kSteps][4];

  // Scores from queries and keys in shared memory, in units of log2 after multiplication by the factor of a row.
  __device__ __forceinline__ void multiply_keys(uint32_t queries, uint32_t keys, const float (&factor)[2]) {
    float products[kKeys], mixed[kKeys / 2];  // of high parts by keys and by their rests; of rests by high parts
    device::wgmma_fence();
#pragma unroll
    for (int s = 0; s < kDk / 16; ++s) {
      const uint32_t query = queries + s / 4 * Shape::kQueryPanel + s % 4 * 32;
      const uint64_t key = device::wgmma_descriptor(keys + s / 4 * Shape::kKeyPanel + s % 4 * 32);
      device::wgmma_scores<false>(products, device::wgmma_descriptor(query), key, s != 0);
      device::wgmma_scores<false>(mixed, device::wgmma_descriptor(query + Shape::kQueryPlane), key, s != 0);
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    hold_registers(products);
    hold_registers(mixed);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      const float small = (products[kKeys / 2 + i] + mixed[i]) * (1.0f / device::kRestScale);
      scores[i] = (products[i] + small) * factor[i / 2 % 2];
    }
  }
  __device__ __forceinline__ void split_weights() {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        weights[k][j] = device::split_pair(scores[8 * k + 2 * j], scores[8 * k + 2 * j + 1], 1.0f, rests[k][j]);
      }
    }
  }
  // Adds the weighted values of a block of keys to the sums, the small products first.
  __device__ __forceinline__ void multiply_values(uint32_t values) {
    float fresh[Shape::kDv / 2];
    uint32_t low[kSteps][4];
#pragma unroll
    for (int i = 0; i < Shape::kDv / 2; ++i) fresh[i] = 0;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) low[k][j] = device::divide_by_rest_scale(weights[k][j]);
    }
    const auto value = [&](int k) {
      return device::wgmma_descriptor_transposed(values + k * 2048, Shape::kValuePanel);
    };
    const auto value_rest = [&](int k) {
      return device::wgmma_descriptor_transposed(values + Shape::kValuePlane + k * 2048, Shape::kValuePanel);
    };
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      device::wgmma_values<false>(fresh, low[k], value_rest(k));
      device::wgmma_values<false>(fresh, rests[k], value(k));
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) device::wgmma_values<false>(fresh, weights[k], value(k));
    device::wgmma_commit();
    device::wgmma_wait<0>();
    hold_registers(fresh);
#pragma unroll
    for (int i = 0; i < Shape::kDv / 2; ++i) sums[i] = sums[i] * shrink[i / 2 % 2] + fresh[i];
  }
};

#endif  // DYNO_DEVICE_WGMMA

template <int kDk>
__global__ void __launch_bounds__(384, 1) flash_wgmma_pairs_kernel(const __grid_constant__ FlashTask task) {
#ifdef DYNO_DEVICE_WGMMA
  device::wait_for_previous();
  using Shape = FlashWgmmaPairs<kDk>;
  constexpr int kKeys = Shape::kKeys;
  const CudaAttention& t = task.common;
  const int kv_head = blockIdx.x, tile_index = blockIdx.y, split = blockIdx.z, group = threadIdx.x / 128 - 1;
  const CudaTile tile = find_tile(t, tile_index, Shape::kRows);
  if (tile.empty()) return;
  const KeyRange range = split_keys(t, tile, split, kKeys);
  if (split >= range.active) return;
  const int blocks = (range.end - range.begin + kKeys - 1) / kKeys;

  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const uint32_t base = device::shared_address(shared);
  const auto key_stage = [&](int block) {
    return base + Shape::kKeysAt + block % Shape::kKeyStages * Shape::kKeyBytes;
  };
  const auto value_stage = [&](int block) {
    return base + Shape::kValuesAt + block % Shape::kValueStages * Shape::kValueBytes;
  };
  // Full barriers of the stages of keys and of values, then the empty ones.
  const auto key_barrier = [&](int block) { return base + Shape::kBarriersAt + block % Shape::kKeyStages * 8; };
  const auto value_barrier = [&](int block) {
    return base + Shape::kBarriersAt + (Shape::kKeyStages + block % Shape::kValueStages) * 8;
  };
  constexpr uint32_t kEmpty = Shape::kBarriers / 2 * 8;
  const auto key_parity = [&](int block) { return block / Shape::kKeyStages & 1; };
  const auto value_parity = [&](int block) { return block / Shape::kValueStages & 1; };
  if (threadIdx.x < Shape::kBarriers) {
    // All loading threads arrive at full barriers, and one lane of each computing warp at empty ones.
    device::barrier_init(base + Shape::kBarriersAt + threadIdx.x * 8, threadIdx.x < Shape::kBarriers / 2 ? 128 : 8);
  }
  __syncthreads();  // barriers are initialised

  if (group < 0) {
    device::fewer_registers<40>();
    const uint8_t* key_base = key_rows(t, tile.run, kv_head);
    const uint8_t* value_base = value_rows(t, tile.run, kv_head);
    const int64_t key_stride = t.args.k_row_bytes, value_stride = t.args.v_row_bytes;
    // In the order of their use: the keys of a block, then the values of the previous one.
    for (int block = 0; block <= blocks; ++block) {
      if (block < blocks) {
        const int first = range.begin + block * kKeys;
        device::barrier_wait(key_barrier(block) + kEmpty, key_parity(block) ^ 1);
        load_pairs<kDk>(key_stage(block), Shape::kKeyPanel, Shape::kKeyRests, key_base + first * key_stride, key_stride,
                        t.dk, range.end - first, key_barrier(block));
      }
      if (block > 0) {
        const int last = block - 1, first = range.begin + last * kKeys;
        device::barrier_wait(value_barrier(last) + kEmpty, value_parity(last) ^ 1);
        load_pairs<Shape::kDv>(value_stage(last), Shape::kValuePanel, Shape::kValuePlane,
                               value_base + first * value_stride, value_stride, t.dv, range.end - first,
                               value_barrier(last));
      }
    }
    device::copy_async_wait<0>();
  } else {
    device::more_registers<232>();
    auto* factors = reinterpret_cast<float*>(shared + Shape::kFactorsAt);
    const int warp = threadIdx.x / 32 - 4, row_offset = 64 * group;
    load_query_pairs<kDk>(t, tile, kv_head, warp * 16, device::kRestScale, reinterpret_cast<uint16_t*>(shared),
                          reinterpret_cast<uint16_t*>(shared + Shape::kQueryPlane), factors, [](int row, int column) {
                            const int chunk = column % 64 / 8 ^ (row & 7);
                            return column / 64 * Shape::kQueryPanel / 2 + row * 64 + chunk * 8 + column % 8;
                          });
    device::fence_async_shared();
    device::named_sync(kMeet, kConsumers);  // queries are written

    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = factors[warp * 16 + threadIdx.x % 32 / 4 + 8 * h] * (t.softcap ? 1.0f : kLog2E);
    }
    PairRows<kDk> rows(t, tile, row_offset, range.end);
    const uint32_t queries = base + row_offset * 128;
    const auto wait_full = [&](uint32_t barrier, uint32_t parity) {
      device::barrier_wait(barrier, parity);
      device::fence_async_shared();
    };
    const auto release = [&](uint32_t barrier) {
      if (threadIdx.x % 32 == 0) device::barrier_arrive(barrier + kEmpty);
    };
    for (int block = 0; block < blocks; ++block) {
      wait_full(key_barrier(block), key_parity(block));
      rows.multiply_keys(queries, key_stage(block), factor);
      release(key_barrier(block));
      rows.softmax(range.begin + block * kKeys);
      rows.split_weights();
      wait_full(value_barrier(block), value_parity(block));
      rows.multiply_values(value_stage(block));
      release(value_barrier(block));
    }
    rows.finish();
    rows.store(tile, row_offset, kv_head, split, range.active == 1);
  }
#endif
}

}  // namespace dyno::ops
