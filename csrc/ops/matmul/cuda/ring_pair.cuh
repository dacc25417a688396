// The ring (ring.cuh) for the gated pairs of one token's experts and of a shared expert. It is a separate kernel,
// because in the general kernel these instructions made other launches up to 8 % slower (h100_shared_expert.json), and
// this kernel needs no other grouping.
//
// The stripes of the shared expert are the first tasks. Their weights do not depend on routing, so warps request them
// before earlier launches end, and the experts' weights once their ids can be read.
#pragma once

#include <climits>

#include "ops/matmul/cuda/ring.cuh"

namespace dyno::ops::cuda {

// The task with this number.
struct RingPairTask {
  int stripe, n;
  int row;  // row of y with experts; -1: the shared expert
};
__device__ __forceinline__ RingPairTask ring_pair_task(const Problem& p, const RingShape& shape, const RingPair& pair,
                                                       uint32_t present, int number) {
  if (number < pair.stripes()) return {number, pair.n, -1};
  number -= pair.stripes();
  const int index = number / shape.stripes;
  return {number - index * shape.stripes, p.n, place_of_bit(present, index)};
}

// Requests the chunks of a warp in their processing order: gate, then up. Owned by one lane.
template <DType kType>
struct RingPairFeed {
  const Problem& p;
  const RingShape& shape;
  const RingPair& pair;
  uint32_t data, arrived;  // addresses of stage 0
  int member, number;
  int tasks = 0, chunk = 0, stage = 0;
  const uint8_t* gate = nullptr;
  const uint8_t* up = nullptr;
  uint64_t policy = device::evict_first_policy();

  __device__ __forceinline__ RingPairFeed(const Problem& problem, const RingShape& s, const RingPair& shared,
                                          const RingBarriers& barriers, uint32_t rings, int warp)
      : p(problem),
        shape(s),
        pair(shared),
        data(rings + warp * s.memory.stages * s.memory.stage_bytes),
        arrived(barriers.arrived(warp, 0)),
        member(warp % s.share),
        number(s.first_task(blockIdx.x, gridDim.x, warp)) {}

  // Whether the known tasks have another chunk.
  __device__ __forceinline__ bool more() const { return number < tasks; }
  // Starts with the tasks of the shared expert only, before anything else is known.
  __device__ __forceinline__ void open() {
    if (member >= 2 * shape.chunks) number = INT_MAX;  // k has fewer chunks than a task has warps
    tasks = pair.stripes();
    if (more()) begin(0);
  }
  // Adds the tasks of the experts of these rows.
  __device__ __forceinline__ void open_experts(uint32_t present) {
    const bool ended = !more();
    tasks = pair.stripes() + shape.stripes * __popc(present);
    if (ended && more()) begin(present);
  }
  // Requests the next chunk for the next stage. Requires more().
  __device__ __forceinline__ void next(uint32_t present) {
    constexpr int kBytes = chunk_bytes(kType);
    const bool second = chunk >= shape.chunks;
    const int at = second ? chunk - shape.chunks : chunk;
    int size = kBytes;
    if constexpr (!gpu_format(kType).super_block()) {
      const int left = (p.k + kGpuTile - 1) / kGpuTile - at * kChunkTiles;
      if (left < kChunkTiles) size = left * gpu_format(kType).tile_bytes();
    }
    device::bulk_copy(data + stage * shape.memory.stage_bytes, (second ? up : gate) + at * kBytes, size,
                      arrived + stage * 8, policy);
    if (++stage == shape.memory.stages) stage = 0;
    chunk += shape.share;
    if (chunk < 2 * shape.chunks) return;
    number += shape.tasks_at_once(gridDim.x);
    if (more()) begin(present);
  }

 private:
  __device__ __forceinline__ void begin(uint32_t present) {
    const RingPairTask task = ring_pair_task(p, shape, pair, present, number);
    int64_t at = task.stripe * gpu_stripe_bytes(kType, p.k);
    if (task.row >= 0) at += device::load_l2(p.ids + task.row) * p.w_stride;
    gate = (task.row < 0 ? pair.w : p.w) + at;
    up = (task.row < 0 ? pair.w_up : p.w_up) + at;
    chunk = member;
  }
};

template <DType kType>
__global__ void __launch_bounds__(kRingThreads, 2)
    ring_pair_kernel(const __grid_constant__ Problem p, const __grid_constant__ RingShape shape,
                     const __grid_constant__ RingPair pair) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0);  // uniform within the warp
  const RingBarriers barriers{device::shared_address(shared + shape.memory.barriers), shape.memory.stages};
  RingPairFeed<kType> feed(p, shape, pair, barriers, device::shared_address(shared), warp);
  uint32_t present = 0;
  int asked = 0;  // number of requested stages
  if (lane == 0) {
    for (int stage = 0; stage < shape.memory.stages; ++stage) device::barrier_init(barriers.arrived(warp, stage), 1);
    for (int buffer = 0; buffer < 2; ++buffer) {
      device::barrier_init(barriers.summed(warp, buffer), 32 * shape.share);
      device::barrier_init(barriers.read(warp, buffer), 32);
    }
    device::barrier_init_done();
    feed.open();
    for (; asked < shape.memory.stages && feed.more(); ++asked) feed.next(0);
  }
  __syncwarp();

  auto* squares = reinterpret_cast<float*>(shared + shape.memory.squares);
  const RingRows<RingForm::units> rows{p, shape, shared};
  const float squares_of_warp = rows.convert(warp, kRingWarps, lane, [&] {
    present = ring_present(p, lane);
    if (lane != 0) return;
    feed.open_experts(present);
    for (; asked < shape.memory.stages && feed.more(); ++asked) feed.next(present);
  });
  if (lane == 0) squares[warp] = squares_of_warp;
  __syncthreads();  // the row has arrived, and all barriers are initialised
  float factor = 1.0f;
  if (p.normed) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRingWarps; ++i) sum += squares[i];
    factor = device::inverse_root(device::quotient(sum, static_cast<float>(p.k)) + p.norm_eps);
  }
  for (uint32_t left = ~present; left != 0; left &= left - 1) {
    const int row = __ffs(static_cast<int>(left)) - 1;
    if (row >= p.rows) break;
    for (int column = blockIdx.x * kRingThreads + threadIdx.x; column < p.n; column += gridDim.x * kRingThreads) {
      p.y[row * p.y_stride + column] = 0;
    }
  }

  const int tiles = (p.k + kGpuTile - 1) / kGpuTile, chunks = 2 * shape.chunks;
  const int group = warp / shape.share, member = warp % shape.share;
  const int tasks = pair.stripes() + shape.stripes * __popc(present);
  const typename RowUnit<kType>::Table table;
  int stage = 0, turn = 0;
  uint32_t phase = 0;
  for (int number = shape.first_task(blockIdx.x, gridDim.x, warp); number < tasks;
       number += shape.tasks_at_once(gridDim.x), ++turn) {
    float gate[2] = {}, up[2] = {};
    for (int chunk = member; chunk < chunks; chunk += shape.share) {
      const bool second = chunk >= shape.chunks;
      const int slice = second ? chunk - shape.chunks : chunk;
      const uint8_t* codes = shared + (warp * shape.memory.stages + stage) * shape.memory.stage_bytes;
      float value[2] = {};
      device::barrier_wait(barriers.arrived(warp, stage), phase);
      ring_units<kType>(codes, min(tiles - slice * kChunkTiles, kChunkTiles), rows, slice, table, lane, value);
      __syncwarp();  // all lanes have read the stage
      if (lane == 0 && feed.more()) feed.next(present);
      if (++stage == shape.memory.stages) stage = 0, phase ^= 1;
      if (second) {
        up[0] += value[0], up[1] += value[1];
      } else {
        gate[0] += value[0], gate[1] += value[1];
      }
    }
    float mine[2];  // for row g + 8·(t & 1), over all blocks of k
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      gate[r] += __shfl_xor_sync(0xffffffffu, gate[r], 1), up[r] += __shfl_xor_sync(0xffffffffu, up[r], 1);
      gate[r] += __shfl_xor_sync(0xffffffffu, gate[r], 2), up[r] += __shfl_xor_sync(0xffffffffu, up[r], 2);
    }
    mine[0] = lane & 1 ? gate[1] : gate[0], mine[1] = lane & 1 ? up[1] : up[0];
    const int row_of_stripe = (lane >> 2) + 8 * (lane & 1);
    if (shape.share > 1) {
      const int buffer = turn & 1;
      auto* partials =
          reinterpret_cast<float*>(shared + shape.memory.partials) + (group * 2 + buffer) * 2 * shape.share * kGpuRows;
      if (turn > 1) device::barrier_wait(barriers.read(group, buffer), (turn / 2 - 1) & 1);
      if ((lane & 3) < 2) {
#pragma unroll
        for (int mat = 0; mat < 2; ++mat) {
          partials[(mat * shape.share + member) * kGpuRows + row_of_stripe] = mine[mat];
        }
      }
      // Each lane arrives separately, as in ring.cuh.
      device::barrier_arrive(barriers.summed(group, buffer));
      if (member != 0) continue;
      device::barrier_wait(barriers.summed(group, buffer), (turn / 2) & 1);
#pragma unroll
      for (int mat = 0; mat < 2; ++mat) {
        mine[mat] = 0;
        for (int i = 0; i < shape.share; ++i) {
          mine[mat] += partials[(mat * shape.share + i) * kGpuRows + row_of_stripe];
        }
      }
      device::barrier_arrive(barriers.read(group, buffer));
    }
    const RingPairTask task = ring_pair_task(p, shape, pair, present, number);
    const int row = task.stripe * kGpuRows + row_of_stripe;
    if (member != 0 || (lane & 3) > 1 || row >= task.n) continue;
    mine[0] *= factor, mine[1] *= factor;
    if (task.row < 0) {
      pair.y[row] = activate(p.activation, mine[0], mine[1]);
    } else {
      store_gated(p, p.ids[task.row], row, task.row * p.y_stride + row, mine[0], mine[1]);
    }
  }
#endif
}

template <DType kType>
void launch_ring_pair(const Problem& p, const RingPair& pair, int share, int blocks, int multiprocessors,
                      CUstream_st* stream) {
  RingShape shape = ring_shape(p, kType, share, blocks);
  shape.tasks += pair.stripes();
  const auto kernel = ring_pair_kernel<kType>;
  DYNO_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.memory.bytes)));
  const int grid = std::min(shape.tasks, multiprocessors * blocks);
  launch_dependent("ring", kernel, dim3(static_cast<unsigned>(grid)), static_cast<unsigned>(kRingThreads),
                   static_cast<size_t>(shape.memory.bytes), stream, p, shape, pair);
}

}  // namespace dyno::ops::cuda
