// The chunks of weights that a warp of `ring` processes, and their copies.
#pragma once

#include "device/bulk_copy.cuh"
#include "device/ptx.cuh"
#include "ops/matmul/cuda/ring.h"

namespace dyno::ops::cuda {

// Bit mask of the rows of y whose expert has a matrix here: at most kRingRows. Only these rows are numbered as tasks.
static_assert(kRingRows == 32);
__device__ __forceinline__ uint32_t ring_present(const Problem& p, int lane) {
  return __ballot_sync(0xffffffffu, lane < p.rows && device::load_l2(p.ids + min(lane, p.rows - 1)) >= 0);
}
__device__ __forceinline__ int ring_tasks(const Problem& p, const RingShape& shape, uint32_t present) {
  return p.grouping == Grouping::experts ? shape.stripes * __popc(present) : shape.tasks;
}
// The position of set bit number `n`. Without a loop, so that the compiler knows that the warp's lanes reconverge.
__device__ __forceinline__ int place_of_bit(uint32_t bits, int n) {
  int place = 0;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const int below = __popc(bits & ((1u << half) - 1u));
    const bool above = n >= below;
    n -= above ? below : 0;
    bits >>= above ? half : 0;
    place += above ? half : 0;
  }
  return place;
}

// The task with this number.
struct RingTask {
  const uint8_t* w;  // stripe `stripe` of matrix 0
  const uint8_t* w_up;
  const float* bias;
  float* y;
  int n, stripe;
  int row;     // row of y
  bool other;  // whether it has the second type
};

template <DType kType, DType kOther>
__device__ __forceinline__ RingTask ring_task(const Problem& p, const RingShape& shape, uint32_t present, int number) {
  RingTask task{p.w, p.w_up, p.bias, p.y, p.n, number, 0, false};
  if (shape.tasks > shape.stripes) {
    const int index = number / shape.stripes;
    task.row = p.grouping == Grouping::experts ? place_of_bit(present, index) : index;
    task.stripe = number - index * shape.stripes;
    task.y += task.row * p.y_stride;
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int stripes = (task.n + kGpuRows - 1) / kGpuRows;
      if (p.more[i].n == 0 || task.stripe < stripes) break;
      task = {p.more[i].w,
              nullptr,
              p.more[i].bias,
              p.more[i].y,
              p.more[i].n,
              task.stripe - stripes,
              0,
              kType != kOther && p.more[i].type == kOther};
    }
  }
  const int64_t bytes = kType != kOther && task.other ? gpu_stripe_bytes(kOther, p.k) : gpu_stripe_bytes(kType, p.k);
  task.w += task.stripe * bytes;
  if (task.w_up != nullptr) task.w_up += task.stripe * bytes;
  return task;
}

// The barriers of a block. For each warp and stage: a chunk has arrived. For each group and each of its two buffers of
// sums: all sums are written, and all sums have been read.
struct RingBarriers {
  uint32_t shared;
  int stages;

  __device__ __forceinline__ uint32_t arrived(int warp, int stage) const {
    return shared + (warp * stages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t summed(int group, int buffer) const {
    return shared + kRingWarps * stages * 8 + (group * 2 + buffer) * 16;
  }
  __device__ __forceinline__ uint32_t read(int group, int buffer) const { return summed(group, buffer) + 8; }
};

// Requests the chunks of a warp in their processing order. Owned by one lane.
template <DType kType, DType kOther>
struct RingFeed {
  const Problem& p;
  const RingShape& shape;
  uint32_t data, arrived;  // addresses of stage 0
  int warp, number, segment = 0, chunk = 0, stage = 0, bytes = 0;
  RingTask task{};
  const uint8_t* w = nullptr;
  uint64_t policy = device::evict_first_policy();
  uint32_t present = 0;
  int tasks = 0;

  __device__ __forceinline__ RingFeed(const Problem& problem, const RingShape& s, const RingBarriers& barriers,
                                      uint32_t shared, int of_warp)
      : p(problem),
        shape(s),
        data(shared + of_warp * s.memory.stages * s.memory.stage_bytes),
        arrived(barriers.arrived(of_warp, 0)),
        warp(of_warp),
        number(s.first_task(blockIdx.x, gridDim.x, of_warp)) {}

  // Called before the first next(); with experts, once their ids can be read; `rows` is then the mask of present rows.
  __device__ __forceinline__ void open(uint32_t rows) {
    present = rows;
    tasks = ring_tasks(p, shape, rows);
    if (number >= tasks) return;
    task = ring_task<kType, kOther>(p, shape, present, number);
    chunk = warp % shape.share;
    settle();
  }
  // Requests the next chunk, if there is one, for the next stage.
  __device__ __forceinline__ void next() {
    if (number >= tasks) return;
    int size = bytes;
    if constexpr (!(gpu_format(kType).super_block() && gpu_format(kOther).super_block())) {
      const int left = (p.k + kGpuTile - 1) / kGpuTile - chunk * kChunkTiles;
      if (left < kChunkTiles) {
        size =
            left * (kType != kOther && task.other ? gpu_format(kOther).tile_bytes() : gpu_format(kType).tile_bytes());
      }
    }
    device::bulk_copy(data + stage * shape.memory.stage_bytes, w, size, arrived + stage * 8, policy);
    if (++stage == shape.memory.stages) stage = 0;
    chunk += shape.share;
    w += shape.share * bytes;
    if (chunk >= shape.chunks) settle();
  }

 private:
  // Moves from a chunk after the end of its segment to the position in a later segment or task.
  __device__ __forceinline__ void settle() {
    while (chunk >= shape.chunks) {
      chunk -= shape.chunks;
      if (++segment < shape.segments) continue;
      number += shape.tasks_at_once(gridDim.x);
      if (number >= tasks) return;
      segment = 0, chunk = warp % shape.share;
      task = ring_task<kType, kOther>(p, shape, present, number);
    }
    const int row = p.grouping == Grouping::summed ? task.row * p.used + segment : task.row;
    w = p.gated() && segment == 1 ? task.w_up : task.w;
    if (p.grouping != Grouping::dense) w += device::load_l2(p.ids + row) * p.w_stride;
    bytes = kType != kOther && task.other ? chunk_bytes(kOther) : chunk_bytes(kType);
    w += chunk * bytes;
  }
};

}  // namespace dyno::ops::cuda
