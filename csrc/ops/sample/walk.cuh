// Finds the id of a row at which a cumulative sum reaches a target, by the block that finishes the row.
#pragma once

#include "ops/sample/row.cuh"

namespace dyno::ops::sampling {

// Walks ids in order until the sum exceeds target(total). sum_of(chunk) is the sum of a chunk; of(key, id, logit) is
// the contribution of an id, 0 if it is skipped. If rounding leaves the target unreached, the last id with a
// contribution is taken. Warp 0 returns the id. Other warps return earlier, so a barrier is needed before shared memory
// is used again.
template <typename SumOf, typename Target, typename Of>
__device__ __forceinline__ int32_t walk(const Row& row, const SumOf& sum_of, const Target& target_of, const Of& of) {
  Shared& shared = *row.shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // First the piece of a thread, then the chunk within the piece, then the id within the chunk.
  const auto [begin, end] = row.piece();
  double own = 0;
  for (uint32_t chunk = begin; chunk < end; ++chunk) own += sum_of(chunk);
  const double in_warp = warp_prefix(own, lane);
  if (lane == 31) shared.warps[warp] = in_warp;
  if (threadIdx.x == 0) shared.first = kThreads, shared.last = 0;
  __syncthreads();  // sums of warps are written
  double before = 0, total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) before = total;
    total += shared.warps[i];
  }
  const double target = target_of(total);
  if (own > 0) {
    if (before + in_warp > target) atomicMin(&shared.first, static_cast<int>(threadIdx.x));
    atomicMax(&shared.last, static_cast<int>(threadIdx.x));
  }
  __syncthreads();  // first and last are written
  if (static_cast<int>(threadIdx.x) == (shared.first < kThreads ? shared.first : shared.last)) {
    double reached = before + (in_warp - own);
    for (uint32_t chunk = begin; chunk < end; ++chunk) {
      const double sum = sum_of(chunk);
      if (sum <= 0) continue;
      shared.chunk = chunk;
      shared.before = reached;
      reached += sum;
      if (reached > target) break;
    }
  }
  __syncthreads();  // the chunk is written
  if (warp != 0) return 0;
  const uint32_t first = row.first_of(shared.chunk, lane);
  const Four four = row.load(first);
  double parts[kPerLane];
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    parts[i] = of(key_of(four.x[i]), static_cast<int32_t>(first + i), four.x[i]);
    sum += parts[i];
  }
  const double reached = shared.before + warp_prefix(sum, lane);
  const unsigned some = __ballot_sync(device::kFullMask, sum > 0);
  const unsigned past = __ballot_sync(device::kFullMask, sum > 0 && reached > target);
  const int chosen = past != 0 ? __ffs(past) - 1 : 31 - __clz(some | 1u);
  int32_t id = -1;
  double at = reached - sum;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (parts[i] > 0 && (id < 0 || at <= target)) id = static_cast<int32_t>(first + i);
    at += parts[i];
  }
  return __shfl_sync(device::kFullMask, id, chosen);
}

}  // namespace dyno::ops::sampling
