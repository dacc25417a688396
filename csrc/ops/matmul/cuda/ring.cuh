// One row of x per matrix: weights are streamed through a ring in shared memory that the copy engine fills. So the
// bytes in flight do not depend on registers, arithmetic or boundaries between stripes. Needs sm_90.
//
// Blocks are persistent: tasks (ring.h) are distributed over the groups of `share` warps of all blocks, and a block
// converts its rows of x to f16 once. A warp takes chunks (16 rows of w by 256 k) member, member + share, … of each
// task of its group from a separate ring, which one of its lanes fills. Warps exchange only the sums of a task. Weights
// that do not depend on earlier launches are requested before those have ended: a matrix that fits into the rings of
// all blocks is on the chip when its x arrives.
//
// A chunk takes 16 MMAs whose operands contain only the codes (block_codes.cuh). Of their 8 columns, one row of x needs
// only one. The columns are used to separate the blocks of k: x of block i is in column i, with zeros elsewhere. So the
// sums of all blocks are in different registers, each in the lane that applies its scale. If all weights have a type
// with a lookup table, both operands are bytes (row_codes.cuh).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda/launch.h"
#include "device/arithmetic.cuh"
#include "device/dependent.cuh"
#include "device/mbarrier.cuh"
#include "ops/matmul/cuda/block_codes.cuh"
#include "ops/matmul/cuda/epilogue.cuh"
#include "ops/matmul/cuda/ring_feed.cuh"
#include "ops/matmul/cuda/ring_rows.cuh"

namespace dyno::ops::cuda {

inline constexpr int kRingThreads = kRingWarps * 32;

// Pairs of halves with which a lane multiplies x in each column of a product: ones in its own column, zeros elsewhere.
// A multiplication of halves takes half as long as a selection, on a pipe that unpacking leaves idle.
struct OnlyColumn {
  uint32_t of_column[8];
  __device__ explicit OnlyColumn(int lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) of_column[i] = lane >> 2 == i ? 0x3c003c00u : 0u;
  }
  template <int kColumn>
  __device__ __forceinline__ uint32_t part(uint32_t x) const {
    return as_bits(__hmul2(as_half2(x), as_half2(of_column[kColumn])));
  }
};

// Adds the contribution of a chunk to `value` (rows g and g + 8; for the lane's blocks). x, sums: of the chunk's slice.
template <DType kType>
__device__ __forceinline__ void ring_chunk(const uint8_t* chunk, int tiles, const uint8_t* x, const float* sums,
                                           int lane, const OnlyColumn& only, float (&value)[2]) {
  using Codes = BlockCodes<kType>;
  const int g = lane >> 2, t = lane & 3;
  uint2 mine[2];  // of two steps: blocks of 32 are adjacent, blocks of 16 eight apart
  if constexpr (Codes::kBlock == 32) {
    const uint4 both = *reinterpret_cast<const uint4*>(x + lane * 16);
    mine[0] = make_uint2(both.x, both.y), mine[1] = make_uint2(both.z, both.w);
  } else {
    const uint8_t* at = x + ((g >> 1) * 4 + t) * 16 + (g & 1) * 8;
    mine[0] = *reinterpret_cast<const uint2*>(at), mine[1] = *reinterpret_cast<const uint2*>(at + 256);
  }
  float products[4][4] = {};  // four, to shorten dependency chains of MMAs
  const auto multiply = [&]<int kTile>() {
    typename Codes::Tile codes;
    Codes::load(codes, chunk, kTile, lane);
    for_each_step([&]<int kStep>() {
      constexpr int kAt = kTile * 4 + kStep;
      constexpr int kHalf = Codes::kBlock == 32 ? kAt % 2 : kAt / 8;
      constexpr int kColumn = Codes::kBlock == 32 ? kAt / 2 : kAt % 8;
      uint32_t a[4];
      Codes::template operand<kStep>(codes, a);
      device::mma_f16(products[Codes::kBlock == 32 ? kAt % 4 : kHalf * 2 + kAt % 2], a,
                      only.part<kColumn>(mine[kHalf].x), only.part<kColumn>(mine[kHalf].y));
    });
  };
  if (Codes::kFormat.super_block() || tiles == kChunkTiles) {
    for_each_step(multiply);
  } else {
    if (tiles > 0) multiply.template operator()<0>();
    if (tiles > 1) multiply.template operator()<1>();
    if (tiles > 2) multiply.template operator()<2>();
  }
#pragma unroll
  for (int set = 0; set < Codes::kSets; ++set) {
    const auto factors = Codes::factors(chunk, set, tiles, lane);
    float of_blocks[2];
    if constexpr (Codes::kBlock == 32) {
      const float4 four = *reinterpret_cast<const float4*>(sums + 4 * t);
      of_blocks[0] = four.x + four.y, of_blocks[1] = four.z + four.w;
    } else {
      const float2 two = *reinterpret_cast<const float2*>(sums + 8 * set + 2 * t);
      of_blocks[0] = two.x, of_blocks[1] = two.y;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int e = 2 * r + b;
        const float product = Codes::kBlock == 32
                                  ? (products[0][e] + products[1][e]) + (products[2][e] + products[3][e])
                                  : products[2 * set][e] + products[2 * set + 1][e];
        value[r] += factors.scale[r][b] * product + factors.rest[r][b] * of_blocks[b];
      }
    }
  }
}

// Adds the products of a chunk and its slice `slice` of x, in units of two tiles, to `value` (rows g and g + 8).
template <DType kType, typename Rows>
__device__ __forceinline__ void ring_units(const uint8_t* chunk, int tiles, const Rows& rows, int slice,
                                           const typename RowUnit<kType>::Table& table, int lane, float (&value)[2]) {
  using Unit = RowUnit<kType>;
#pragma unroll
  for (int i = 0; i < kChunkUnits; ++i) {
    if (!Unit::kFormat.super_block() && i * kUnitTiles >= tiles) break;
    Unit unit;
    unit.template load<true>(chunk, i, tiles, lane);
    RowBytes x = rows.read(slice * kChunkUnits + i, lane);
    if constexpr (!Unit::kSmall) x.sums[0] += x.sums[1];
    unit.multiply(x, table, lane, value);
  }
}

// Stores row `row` of a task with a known sum (gated: two sums).
__device__ __forceinline__ void ring_store(const Problem& p, const RingTask& task, int row, int expert, float base,
                                           float bias, const float (&total)[2]) {
  if (p.gated()) return store_gated(p, expert, row, task.y + row - p.y, total[0], total[1]);
  task.y[row] = base + p.scale * (total[0] + bias);
}

template <DType kType, DType kOther>
__global__ void __launch_bounds__(kRingThreads, 2)
    ring_kernel(const __grid_constant__ Problem p, const __grid_constant__ RingShape shape) {
#if __CUDA_ARCH__ >= 900
  constexpr RingForm kForm = ring_form(kType, kOther);
  if (p.grouping != Grouping::experts) device::let_next_start();
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x & 31;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x >> 5), 0);  // uniform within the warp
  const bool experts = p.grouping != Grouping::dense, summed = p.grouping == Grouping::summed;
  const bool early = !experts || (summed && p.settled);  // the choice of weights is known before earlier launches end
  const RingBarriers barriers{device::shared_address(shared + shape.memory.barriers), shape.memory.stages};
  RingFeed<kType, kOther> feed(p, shape, barriers, device::shared_address(shared), warp);
  uint32_t present = 0;  // bit mask of rows, with experts
  const auto fill = [&] {
    feed.open(present);
    for (int stage = 0; stage < shape.memory.stages; ++stage) feed.next();
  };
  if (lane == 0) {
    for (int stage = 0; stage < shape.memory.stages; ++stage) device::barrier_init(barriers.arrived(warp, stage), 1);
    for (int buffer = 0; buffer < 2; ++buffer) {
      device::barrier_init(barriers.summed(warp, buffer), 32 * shape.share);
      device::barrier_init(barriers.read(warp, buffer), 32);
    }
    device::barrier_init_done();
    if (early) fill();
  }
  __syncwarp();

  auto* squares = reinterpret_cast<float*>(shared + shape.memory.squares);
  const RingRows<kForm> rows{p, shape, shared};
  const float squares_of_warp = rows.convert(warp, kRingWarps, lane, [&] {
    if (p.grouping == Grouping::experts) present = ring_present(p, lane);
    if (!early && lane == 0) fill();
  });
  if (lane == 0) squares[warp] = squares_of_warp;
  __syncthreads();  // the rows have arrived, and all barriers are initialised
  float factor = 1.0f;
  if (p.normed) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kRingWarps; ++i) sum += squares[i];
    factor = device::inverse_root(device::quotient(sum, static_cast<float>(p.k)) + p.norm_eps);
  }

  const int tiles = (p.k + kGpuTile - 1) / kGpuTile;
  const int group = warp / shape.share, member = warp % shape.share;
  const auto* scales = reinterpret_cast<const float*>(shared + shape.memory.scales);
  const auto* sums_of_x = reinterpret_cast<const float*>(shared + shape.memory.sums);
  if (p.grouping == Grouping::experts) {
    for (uint32_t left = ~present; left != 0; left &= left - 1) {
      const int row = __ffs(static_cast<int>(left)) - 1;
      if (row >= p.rows) break;
      for (int column = blockIdx.x * kRingThreads + threadIdx.x; column < p.n; column += gridDim.x * kRingThreads) {
        p.y[row * p.y_stride + column] = 0;
      }
    }
  }
  const int tasks = ring_tasks(p, shape, present);
  [[maybe_unused]] const typename RowUnit<kType>::Table table;
  [[maybe_unused]] const OnlyColumn only(lane);
  int stage = 0, turn = 0;
  uint32_t phase = 0;
  for (int number = shape.first_task(blockIdx.x, gridDim.x, warp); number < tasks;
       number += shape.tasks_at_once(gridDim.x), ++turn) {
    const RingTask task = ring_task<kType, kOther>(p, shape, present, number);
    const int row = task.stripe * kGpuRows + (lane >> 2) + 8 * (lane & 1);
    const bool stores = member == 0 && (lane & 3) < 2 && row < task.n;
    const int expert = p.grouping == Grouping::experts ? p.ids[task.row] : 0;
    float base = 0, bias = 0;  // loaded while the product is computed
    if (stores && p.residual != nullptr) base = p.residual[task.row * p.y_stride + row];
    if (stores && task.bias != nullptr && !p.gated()) {
      if (summed) {
        for (int slot = task.row * p.used; slot < (task.row + 1) * p.used; ++slot) {
          bias += p.slot_weights[slot] * task.bias[static_cast<int64_t>(p.ids[slot]) * p.n + row];
        }
      } else {
        bias = task.bias[static_cast<int64_t>(expert) * task.n + row];
      }
    }
    float sums[2][2] = {};  // of gate and up, or a single sum
    int chunk = member;
    for (int segment = 0; segment < shape.segments; ++segment, chunk -= shape.chunks) {
      const int slot = summed ? task.row * p.used + segment : task.row;
      const int x_row = summed ? slot : experts ? slot / p.x_divisor : 0;
      const float weight = summed ? p.slot_weights[slot] : 1.0f;
      float total[2] = {};
      for (; chunk < shape.chunks; chunk += shape.share) {
        const int slice = x_row * shape.chunks + chunk;
        const uint8_t* x = shared + shape.memory.halves + slice * kChunkK * 2;
        const uint8_t* codes = shared + (warp * shape.memory.stages + stage) * shape.memory.stage_bytes;
        const float* sums_of_slice = sums_of_x + slice * (kChunkK / 16);
        const int there = min(tiles - chunk * kChunkTiles, kChunkTiles);
        float value[2] = {};
        device::barrier_wait(barriers.arrived(warp, stage), phase);
        if constexpr (kForm == RingForm::units) {
          ring_units<kType>(codes, there, rows, slice, table, lane, value);
        } else if (kType != kOther && task.other) {
          ring_chunk<kOther>(codes, there, x, sums_of_slice, lane, only, value);
        } else {
          ring_chunk<kType>(codes, there, x, sums_of_slice, lane, only, value);
        }
        __syncwarp();  // all lanes have read the stage
        if (lane == 0) feed.next();
        if (++stage == shape.memory.stages) stage = 0, phase ^= 1;
        const float back = kForm == RingForm::units ? weight : weight * scales[slice];
        total[0] += back * value[0], total[1] += back * value[1];
      }
      if (p.gated() && segment == 1) {
        sums[1][0] = total[0], sums[1][1] = total[1];
      } else {
        sums[0][0] += total[0], sums[0][1] += total[1];
      }
    }
    const int mats = p.gated() ? 2 : 1;
    float mine[2] = {};  // for row g + 8·(t & 1), over all blocks of k
#pragma unroll
    for (int mat = 0; mat < 2; ++mat) {
      if (mat == mats) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[mat][r] += __shfl_xor_sync(0xffffffffu, sums[mat][r], 1);
        sums[mat][r] += __shfl_xor_sync(0xffffffffu, sums[mat][r], 2);
      }
      mine[mat] = lane & 1 ? sums[mat][1] : sums[mat][0];
    }
    if (shape.share > 1) {
      const int buffer = turn & 1;
      auto* partials =
          reinterpret_cast<float*>(shared + shape.memory.partials) + (group * 2 + buffer) * 2 * shape.share * kGpuRows;
      if (turn > 1) device::barrier_wait(barriers.read(group, buffer), (turn / 2 - 1) & 1);
      if ((lane & 3) < 2) {
        for (int mat = 0; mat < mats; ++mat) {
          partials[(mat * shape.share + member) * kGpuRows + (lane >> 2) + 8 * (lane & 1)] = mine[mat];
        }
      }
      // Each lane arrives separately, because compute-sanitizer does not see that a warp barrier orders other lanes'
      // writes.
      device::barrier_arrive(barriers.summed(group, buffer));
      if (member != 0) continue;
      device::barrier_wait(barriers.summed(group, buffer), (turn / 2) & 1);
      for (int mat = 0; mat < mats; ++mat) {
        mine[mat] = 0;
        for (int i = 0; i < shape.share; ++i) {
          mine[mat] += partials[(mat * shape.share + i) * kGpuRows + (lane >> 2) + 8 * (lane & 1)];
        }
      }
      device::barrier_arrive(barriers.read(group, buffer));
    }
    mine[0] *= factor, mine[1] *= factor;
    if (stores) ring_store(p, task, row, expert, base, bias, mine);
  }
#endif
}

// One row of y per matrix; `p` as filled by run_stream().
template <DType kType, DType kOther>
void launch_ring(const Problem& p, int share, int blocks, int multiprocessors, CUstream_st* stream) {
  const RingShape shape = ring_shape(p, kOther, share, blocks);
  const auto kernel = ring_kernel<kType, kOther>;
  DYNO_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.memory.bytes)));
  const int grid = std::min(shape.tasks, multiprocessors * blocks);
  launch_dependent("ring", kernel, dim3(static_cast<unsigned>(grid)), static_cast<unsigned>(kRingThreads),
                   static_cast<size_t>(shape.memory.bytes), stream, p, shape);
}

}  // namespace dyno::ops::cuda
