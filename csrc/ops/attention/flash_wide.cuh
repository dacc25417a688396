// Flash attention for prompts on Hopper with heads of 257 to 512 dimensions. The weighted sums of 64 query rows fill
// the registers of two warpgroups, so a block has four:
//   loader   fills parts of keys and of values in shared memory, each guarded by a pair of barriers (full, empty).
//   scorer   multiplies queries by keys, and writes f16 weights and the factors of earlier sums to shared memory.
//   summers  two of them, each for 256 of the value columns: add the weighted values.
// The scorer runs up to two blocks of keys ahead of the summers, so that its exponentials run during their products.
// The order of sums depends only on the shapes.
#pragma once

#include "ops/attention/flash_wgmma.cuh"

namespace dyno::ops {

struct FlashWide {
  static constexpr int kHead = static_cast<int>(kFlashWideHead), kHalf = kHead / 2;  // kHalf: value columns of a summer
  static constexpr int kRows = 64, kKeys = 64, kThreads = 512;
  static constexpr int kKeyParts = 4, kPartColumns = kHead / kKeyParts;        // parts of a block of keys, by columns
  static constexpr int kValueParts = 2, kPartKeys = kKeys / kValueParts;       // parts of a half of its values, by rows
  static constexpr int kBuffers = 2;                                           // of weights
  static constexpr uint32_t kPanel = 64 * 128, kValuePanel = kPartKeys * 128;  // bytes of 64 columns
  static constexpr uint32_t kKeyPart = kPanel * (kPartColumns / 64), kValuePart = kValuePanel * (kHalf / 64);
  // Offsets after the queries.
  static constexpr uint32_t kKeysAt = kPanel * (kHead / 64);
  static constexpr uint32_t kValuesAt = kKeysAt + kKeyParts * kKeyPart;
  static constexpr uint32_t kWeightsAt = kValuesAt + 2 * kValueParts * kValuePart;
  static constexpr uint32_t kStatsAt = kWeightsAt + kBuffers * kPanel;  // floats per row: factors, maxima, totals
  static constexpr uint32_t kBarriersAt = kStatsAt + (kBuffers + 2) * kRows * 4;
  // Full and empty barriers of: the parts of keys, the parts of values of both halves, the weights.
  static constexpr int kPairs = kKeyParts + 2 * kValueParts + kBuffers;
  static constexpr uint32_t kSharedBytes = kBarriersAt + 2 * kPairs * 8 + 1024;  // and padding to align the start
};

#ifdef DYNO_DEVICE_WGMMA

inline constexpr int kWideMeet = 2;  // named barrier of scorer and summers; kMeet is for the summers

struct FlashWideMemory {
  using Shape = FlashWide;
  uint32_t base;
  float* stats;

  __device__ uint32_t keys(int part) const { return base + Shape::kKeysAt + part * Shape::kKeyPart; }
  __device__ uint32_t values(int half, int part) const {
    return base + Shape::kValuesAt + (half * Shape::kValueParts + part) * Shape::kValuePart;
  }
  __device__ uint32_t weights(int block) const {
    return base + Shape::kWeightsAt + block % Shape::kBuffers * Shape::kPanel;
  }
  __device__ float& factor(int block, int row) const { return stats[block % Shape::kBuffers * Shape::kRows + row]; }
  __device__ float& maximum(int row) const { return stats[Shape::kBuffers * Shape::kRows + row]; }
  __device__ float& total(int row) const { return stats[(Shape::kBuffers + 1) * Shape::kRows + row]; }

  // The full barrier of a pair; the empty one follows it.
  __device__ uint32_t pair(int index) const { return base + Shape::kBarriersAt + index * 16; }
  __device__ uint32_t key_pair(int part) const { return pair(part); }
  __device__ uint32_t value_pair(int half, int part) const {
    return pair(Shape::kKeyParts + half * Shape::kValueParts + part);
  }
  __device__ uint32_t weight_pair(int block) const {
    return pair(Shape::kKeyParts + 2 * Shape::kValueParts + block % Shape::kBuffers);
  }
  // Called by one thread. All loading threads, and all threads of the scorer, arrive at full barriers; one lane of each
  // reading warp arrives at empty ones.
  __device__ void init_barriers() const {
    for (int i = 0; i < Shape::kPairs; ++i) {
      device::barrier_init(pair(i), 128);
      device::barrier_init(pair(i) + 8, i < Shape::kKeyParts + 2 * Shape::kValueParts ? 4 : 8);
    }
  }
  static __device__ void wait_full(uint32_t of, int parity) {
    device::barrier_wait(of, parity);
    device::fence_async_shared();
  }
  static __device__ void wait_empty(uint32_t of, int parity) { device::barrier_wait(of + 8, parity ^ 1); }
  static __device__ void release(uint32_t of) {
    if (threadIdx.x % 32 == 0) device::barrier_arrive(of + 8);
  }
};

// The parity of a weight buffer's use by a block of keys. Parts of keys and of values are used by every block.
__device__ __forceinline__ int weight_parity(int block) { return block / FlashWide::kBuffers & 1; }

template <bool kBf16>
__device__ __forceinline__ void load_wide(const FlashTask& task, const CudaTile& tile, int kv_head,
                                          const KeyRange& range, int blocks, const FlashWideMemory& memory) {
  using Shape = FlashWide;
  const CudaAttention& t = task.common;
  const auto column_bytes = [](int type, int column) {
    return static_cast<device::Scalar>(type) == device::Scalar::q8_0 ? column / 32 * 34 : column * 2;
  };
  const int64_t value_stride = t.v_in_k ? t.args.k_row_bytes : t.args.v_row_bytes;
  const uint8_t* key_base = key_rows(t, tile.run, kv_head) + range.begin * t.args.k_row_bytes;
  const uint8_t* value_base = value_rows(t, tile.run, kv_head) + range.begin * value_stride;
  // The keys of a block come before the values of the previous one, in the order of use.
  for (int block = 0; block <= blocks; ++block) {
    if (block < blocks) {
      const int first = block * Shape::kKeys;
      const uint8_t* rows = key_base + first * t.args.k_row_bytes;
#pragma unroll 1
      for (int part = 0; part < Shape::kKeyParts; ++part) {
        const int column = part * Shape::kPartColumns;
        FlashWideMemory::wait_empty(memory.key_pair(part), block & 1);
        load_panels<Shape::kPartColumns, kBf16, Shape::kKeys>(
            memory.keys(part), rows + column_bytes(task.k_type, column), t.args.k_row_bytes, task.k_type, task.aligned,
            t.dk - column, range.end - range.begin - first, memory.key_pair(part));
      }
    }
    if (block == 0) continue;
#pragma unroll 1
    for (int i = 0; i < 2 * Shape::kValueParts; ++i) {
      const int part = i / 2, half = i % 2, column = half * Shape::kHalf;
      const int first = (block - 1) * Shape::kKeys + part * Shape::kPartKeys;
      FlashWideMemory::wait_empty(memory.value_pair(half, part), (block - 1) & 1);
      load_panels<Shape::kHalf, kBf16, Shape::kPartKeys>(
          memory.values(half, part), value_base + first * value_stride + column_bytes(task.v_type, column),
          value_stride, task.v_type, task.aligned, t.dv - column, range.end - range.begin - first,
          memory.value_pair(half, part));
    }
  }
  device::copy_async_wait<0>();
}

template <bool kBf16>
__device__ __forceinline__ void score_wide(const CudaAttention& t, const CudaTile& tile, const KeyRange& range,
                                           int blocks, const FlashWideMemory& memory) {
  using Shape = FlashWide;
  WgmmaRows<Shape::kHead, 64, kBf16, 1> rows(t, tile, 0, range.end);   // its sums are unused
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // and row + 8
  for (int block = 0; block < blocks; ++block) {
#pragma unroll
    for (int part = 0; part < Shape::kKeyParts; ++part) {
      FlashWideMemory::wait_full(memory.key_pair(part), block & 1);
      device::wgmma_fence();
#pragma unroll
      for (int s = 0; s < Shape::kPartColumns / 16; ++s) {
        const int panel = part * (Shape::kPartColumns / 64) + s / 4;
        const uint64_t a = device::wgmma_descriptor(memory.base + panel * Shape::kPanel + s % 4 * 32);
        const uint64_t b = device::wgmma_descriptor(memory.keys(part) + s / 4 * Shape::kPanel + s % 4 * 32);
        device::wgmma_scores<kBf16>(rows.scores, a, b, part != 0 || s != 0);
      }
      device::wgmma_commit();
      if (part > 0) {
        device::wgmma_wait<1>();
        FlashWideMemory::release(memory.key_pair(part - 1));
      }
    }
    device::wgmma_wait<0>();
    hold_registers(rows.scores);
    FlashWideMemory::release(memory.key_pair(Shape::kKeyParts - 1));
    rows.softmax(range.begin + block * Shape::kKeys);
    rows.pack_weights();

    const uint32_t pair = memory.weight_pair(block), to = memory.weights(block) + row * 128 + rows.quad * 4;
    FlashWideMemory::wait_empty(pair, weight_parity(block));
#pragma unroll
    for (int k = 0; k < Shape::kKeys / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Register j has columns 8·(2k + j / 2) + 2·quad of row + 8·(j % 2); rows eight apart have the same swizzle.
        const uint32_t chunk = static_cast<uint32_t>(2 * k + j / 2) ^ (row & 7);
        store_shared_4(to + j % 2 * 1024 + (chunk << 4), rows.weights[k][j]);
      }
    }
    if (rows.quad == 0) memory.factor(block, row) = rows.shrink[0], memory.factor(block, row + 8) = rows.shrink[1];
    device::fence_async_shared();
    device::barrier_arrive(pair);
  }
  rows.finish();
  if (rows.quad == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      memory.maximum(row + 8 * h) = rows.best[h], memory.total(row + 8 * h) = rows.total[h];
    }
  }
  device::named_sync(kWideMeet, 384);  // maxima and totals are written
}

template <bool kBf16>
__device__ __forceinline__ void sum_wide(const CudaAttention& t, const CudaTile& tile, int tile_index, int kv_head,
                                         int split, const KeyRange& range, int blocks, int half,
                                         const FlashWideMemory& memory) {
  using Shape = FlashWide;
  WgmmaRows<Shape::kHead, Shape::kHalf, kBf16, 1> rows(t, tile, 0, range.end);  // its scores are unused
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;           // and row + 8
  for (int block = 0; block < blocks; ++block) {
    const uint32_t pair = memory.weight_pair(block);
    FlashWideMemory::wait_full(pair, weight_parity(block));
    rows.shrink[0] = memory.factor(block, row), rows.shrink[1] = memory.factor(block, row + 8);
    if (__any_sync(device::kFullMask, rows.shrink[0] != 1.0f || rows.shrink[1] != 1.0f)) rows.shrink_sums();
#pragma unroll
    for (int part = 0; part < Shape::kValueParts; ++part) {
      FlashWideMemory::wait_full(memory.value_pair(half, part), block & 1);
      device::wgmma_fence();
#pragma unroll
      for (int k = 0; k < Shape::kPartKeys / 16; ++k) {
        const uint64_t a = device::wgmma_descriptor(memory.weights(block) + (part * (Shape::kPartKeys / 16) + k) * 32);
        const auto b = [&](int panel) {
          const uint32_t values = memory.values(half, part) + panel * Shape::kValuePanel + k * 2048;
          return device::wgmma_descriptor_transposed(values, Shape::kValuePanel);
        };
        device::wgmma_values_shared<kBf16, 0>(rows.sums, a, b(0));
        device::wgmma_values_shared<kBf16, 64>(rows.sums, a, b(2));
      }
      device::wgmma_commit();
      if (part > 0) {
        device::wgmma_wait<1>();
        FlashWideMemory::release(memory.value_pair(half, part - 1));
      }
    }
    device::wgmma_wait<0>();
    hold_registers(rows.sums);
    FlashWideMemory::release(memory.value_pair(half, Shape::kValueParts - 1));
    FlashWideMemory::release(pair);
  }
  device::named_sync(kWideMeet, 384);  // maxima and totals are written
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.best[h] = memory.maximum(row + 8 * h), rows.total[h] = memory.total(row + 8 * h);
  const bool whole = range.active == 1;
  rows.store(tile, 0, kv_head, split, whole, half * Shape::kHalf);
}

#endif  // DYNO_DEVICE_WGMMA

template <bool kBf16>
__global__ void __launch_bounds__(FlashWide::kThreads, 1) flash_wide_kernel(const __grid_constant__ FlashTask task) {
#ifdef DYNO_DEVICE_WGMMA
  device::wait_for_previous();
  using Shape = FlashWide;
  const CudaAttention& t = task.common;
  const int kv_head = blockIdx.x, tile_index = blockIdx.y, split = blockIdx.z, group = threadIdx.x / 128;
  const CudaTile tile = find_tile(t, tile_index, Shape::kRows);
  if (tile.empty()) return;
  const KeyRange range = split_keys(t, tile, split, flash_split_step(Shape::kKeys));
  if (split >= range.active) return;
  const int blocks = (range.end - range.begin + Shape::kKeys - 1) / Shape::kKeys;

  extern __shared__ uint8_t shared_raw[];
  uint8_t* shared = shared_raw + (1024 - device::shared_address(shared_raw) % 1024) % 1024;
  const FlashWideMemory memory{device::shared_address(shared), reinterpret_cast<float*>(shared + Shape::kStatsAt)};
  if (threadIdx.x == 0) memory.init_barriers();
  __syncthreads();  // barriers are initialised

  // The sum equals the registers of 512 threads with 128 each.
  if (group == 0) {
    device::fewer_registers<56>();
    load_wide<kBf16>(task, tile, kv_head, range, blocks, memory);
  } else if (group == 1) {
    device::fewer_registers<120>();
    device::named_sync(kWideMeet, 384);  // queries are written
    score_wide<kBf16>(t, tile, range, blocks, memory);
  } else {
    device::more_registers<168>();
    load_queries<Shape::kHead, kBf16, Shape::kRows>(t, tile, kv_head, memory.base, threadIdx.x - 256);
    device::fence_async_shared();
    device::named_sync(kWideMeet, 384);  // queries are written
    sum_wide<kBf16>(t, tile, tile_index, kv_head, split, range, blocks, group - 2, memory);
  }
#endif
}

}  // namespace dyno::ops
