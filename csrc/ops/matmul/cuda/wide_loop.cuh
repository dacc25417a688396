// The loop over k of the kernels with wide tiles: two warpgroups multiply 64 rows of w each by the same rows of x,
// which arrive in stages. Each block of a cluster of two copies half of a stage to both.
#pragma once

#include "device/cluster.cuh"
#include "device/wgmma_wide.cuh"
#include "ops/matmul/cuda/weight_tile.cuh"
#include "ops/matmul/cuda/wide.h"

namespace dyno::ops::cuda {

inline constexpr uint32_t kWideStageBytes = kWideTokens * 128, kWideStages = 4;
inline constexpr int kWidePrefetch = 6;  // prefetch distance of weights into L2, in tiles

// Tiles of k of a part, in the order of TiledRows.
struct WideRange {
  int begin, end;
  __device__ __forceinline__ WideRange(int tiles, int part, int parts)
      : begin(tiles * part / parts), end(tiles * (part + 1) / parts) {}
  // The first tile of the weights, whose k is not repeated for a second pass.
  __device__ __forceinline__ int first_weights(int weight_tiles) const {
    return begin >= weight_tiles ? begin - weight_tiles : begin;
  }
};

#ifdef DYNO_DEVICE_WGMMA

struct WideStages {
  uint32_t base, barriers;
  __device__ __forceinline__ uint32_t at(uint32_t number) const {
    return base + number % kWideStages * kWideStageBytes;
  }
  __device__ __forceinline__ uint32_t full(uint32_t number) const { return barriers + number % kWideStages * 16; }
  __device__ __forceinline__ uint32_t empty(uint32_t number) const { return full(number) + 8; }
  static __device__ __forceinline__ uint32_t parity(uint32_t number) { return number / kWideStages & 1; }
};

// A warp's stripe of weights over a range of k, and the stripe that it multiplies next.
struct WideRun {
  WideRange range;
  const uint8_t* stripe;
  const uint8_t* after;  // of the next tile
  int after_begin;       // its first tile of k
  int weight_tiles;      // of all k
  int tiles;             // the same for each pass over x
};

// Tiles of weights on their way to a warp's registers: one is multiplied while kAhead others arrive. A range of k must
// have kAhead tiles or more.
template <DType kType, int kAhead>
struct WideWeights {
  static constexpr int kSlots = kAhead + 1;
  typename WeightTile<kType>::Cursor cursor;
  WeightTile<kType> tile[kSlots];
  int first = 0;  // slot of the first tile of the next range

  // Requests the first tiles of a stripe.
  __device__ __forceinline__ WideWeights(const uint8_t* stripe, int begin) : cursor(stripe, begin, threadIdx.x & 31) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i > 0) cursor.advance();
      tile[i].load(cursor);
    }
  }
  // Moves the first tiles to the first slots, because slots are constants in the loop.
  __device__ __forceinline__ void align() {
    const auto from = [&]<int kFirst>() {
      WeightTile<kType> moved[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) moved[i] = tile[(kFirst + i) % kSlots];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) tile[i] = moved[i];
    };
    if (first == 1) from.template operator()<1>();
    if constexpr (kSlots > 2) {
      if (first == 2) from.template operator()<2>();
    }
  }
  // Requests tile `at` of k, of which those from the end of the range on belong to the next stripe.
  template <int kSlot>
  __device__ __forceinline__ void request(const WideRun& run, int at) {
    if (at == run.range.end) {
      cursor = typename WeightTile<kType>::Cursor(run.after, run.after_begin, threadIdx.x & 31);
    } else if (half_passes(kType) > 1 && at == run.weight_tiles) {
      cursor = typename WeightTile<kType>::Cursor(run.stripe, 0, threadIdx.x & 31);
    } else {
      cursor.advance();
    }
    tile[kSlot % kSlots].load(cursor);
  }
};

// Steps of k that are issued together. If weights take few instructions, the latency of unpacking them counts.
template <DType kType>
inline constexpr int kWideSteps = gpu_format(kType).scale == GpuScale::d ? 2 : 1;

// Adds the products of a range of k to `sums`, [64 rows, 2 * kCount columns]. While products run, the next fragments of
// weights are unpacked. `number`: of the next stage.
template <DType kType, int kAhead, size_t kCount>
__device__ __forceinline__ void wide_sums(const WideStages& stages, const WideRun& run, uint32_t& number,
                                          WideWeights<kType, kAhead>& weights, float (&sums)[kCount]) {
  constexpr GpuFormat kFormat = gpu_format(kType);
  constexpr int kTileStep = kFormat.unit_bytes() / (kFormat.unit_k() / kGpuTile);  // approximate bytes
  constexpr int kSteps = kWideSteps<kType>;
  const int lane = threadIdx.x & 31;
  weights.align();
  uint32_t a[2][kSteps][4];  // running products read one half while the other is written
  int at = run.range.begin;
  const auto multiply = [&]<int kSlot>() __attribute__((always_inline)) {
    const uint64_t x = device::wgmma_descriptor(stages.at(number));
    for_each_step([&]<int kStep>() {
      constexpr int kHalf = kStep / kSteps % 2;
      // At most the products of one half are running, so the other half is no longer read.
      weights.tile[kSlot].template fragment<kStep>(a[kHalf][kStep % kSteps]);
      if constexpr (kStep % kSteps != kSteps - 1) return;
      constexpr int kFirst = kStep - kSteps + 1;
      if constexpr (kFirst == 0) device::wait_at(stages.full(number), stages.parity(number));
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i) device::wgmma_f16(sums, a[kHalf][i], x + 2 * (kFirst + i));
      device::wgmma_commit();
      if constexpr (kFirst == 0) {
        weights.template request<kSlot + kAhead>(run, at + kAhead);
      } else if constexpr (kFirst == 2) {
        const int passed = run.tiles - run.weight_tiles;
        const int ahead = at + kWidePrefetch - passed, end = run.range.end - passed;
        if (lane < (kTileStep + 127) / 128 && ahead >= 0) {
          const uint8_t* from = ahead < end ? run.stripe + int64_t{ahead} * kTileStep
                                            : run.after + int64_t{ahead - end + run.after_begin} * kTileStep;
          device::prefetch_l2(from + lane * 128);
        }
      }
      device::wgmma_wait<1>();
      // Only products of this stage are running, so the previous stage is no longer read.
      if constexpr (kFirst == 0) {
        if (at > run.range.begin && lane < 2) device::barrier_arrive_at(stages.empty(number - 1), lane);
      }
    });
    ++at, ++number;
    weights.first = (kSlot + 1) % (kAhead + 1);
    return at < run.range.end;
  };
  while (multiply.template operator()<0>() && multiply.template operator()<1>()) {
    if constexpr (kAhead > 1) {
      if (!multiply.template operator()<2>()) break;
    }
  }
  device::wgmma_wait<0>();
  if (lane < 2) device::barrier_arrive_at(stages.empty(number - 1), lane);
}
#endif  // DYNO_DEVICE_WGMMA

}  // namespace dyno::ops::cuda
