// Which chunks of weights a warp of `ring` takes, and the copies that bring them.
#pragma once

#include "device/bulk_copy.cuh"
#include "ops/matmul/cuda/ring.h"

namespace dyno::ops::cuda {

// The task with that number.
struct RingTask {
  const uint8_t* w;  // stripe `stripe` of matrix 0
  const uint8_t* w_up;
  const float* bias;
  float* y;
  int n, stripe;
  int row;     // of y
  bool other;  // of the second type
};

template <DType kType, DType kOther>
__device__ __forceinline__ RingTask ring_task(const Problem& p, const RingShape& shape, int number) {
  RingTask task{p.w, p.w_up, p.bias, p.y, p.n, number, 0, false};
  if (shape.tasks > shape.stripes) {
    task.row = number / shape.stripes;
    task.stripe = number - task.row * shape.stripes;
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

// The barriers of a block: of each warp one for every stage of its ring, which tells that a chunk has arrived; of each
// group and its two buffers of sums one that tells that all are there, and one that all have been read.
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

// Asks for the chunks of a warp, in the order in which it takes them. Kept by one lane.
template <DType kType, DType kOther>
struct RingFeed {
  const Problem& p;
  const RingShape& shape;
  uint32_t data, arrived;  // of stage 0
  int warp, number, segment = 0, chunk = 0, stage = 0, bytes = 0;
  RingTask task{};
  const uint8_t* w = nullptr;
  uint64_t policy = device::evict_first_policy();

  __device__ __forceinline__ RingFeed(const Problem& problem, const RingShape& s, const RingBarriers& barriers,
                                      uint32_t shared, int of_warp)
      : p(problem),
        shape(s),
        data(shared + of_warp * s.memory.stages * s.memory.stage_bytes),
        arrived(barriers.arrived(of_warp, 0)),
        warp(of_warp),
        number(s.first_task(blockIdx.x, gridDim.x, of_warp)) {}

  // Before the first next(); with experts once their ids can be read.
  __device__ __forceinline__ void open() {
    if (number >= shape.tasks) return;
    task = ring_task<kType, kOther>(p, shape, number);
    chunk = warp % shape.share;
    settle();
  }
  // The next chunk into the next stage, if there is one.
  __device__ __forceinline__ void next() {
    if (number >= shape.tasks) return;
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
  // From a chunk beyond its segment's last to where it is in a later segment or in a later task that has a matrix.
  __device__ __forceinline__ void settle() {
    int matrix = -1;
    while (matrix < 0) {
      while (chunk >= shape.chunks) {
        chunk -= shape.chunks;
        if (++segment < shape.segments) continue;
        number += shape.tasks_at_once(gridDim.x);
        if (number >= shape.tasks) return;
        segment = 0, chunk = warp % shape.share;
        task = ring_task<kType, kOther>(p, shape, number);
      }
      const int row = p.grouping == Grouping::summed ? task.row * p.used + segment : task.row;
      matrix = p.grouping == Grouping::dense ? 0 : device::load_l2(p.ids + row);
      if (matrix < 0) segment = shape.segments - 1, chunk = shape.chunks;  // on to the next task
    }
    w = (p.gated() && segment == 1 ? task.w_up : task.w) + matrix * p.w_stride;
    bytes = kType != kOther && task.other ? chunk_bytes(kOther) : chunk_bytes(kType);
    w += chunk * bytes;
  }
};

}  // namespace dyno::ops::cuda
