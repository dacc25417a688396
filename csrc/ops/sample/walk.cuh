// Which id of a row a cumulative sum reaches, by the block that ends the row.
#pragma once

#include "ops/sample/row.cuh"

namespace dyno::ops::sampling {

// Walks ids in order until the sum exceeds target(total). sum_of(chunk) is the sum of a chunk; of(key, id, logit) what
// an id adds to it, 0 of one that is passed over. Where rounding leaves the target unreached, the last one that adds
// anything is taken. In warp 0: the id. Other warps are through before that one; a barrier has to come before shared
// memory is used again.
template <typename SumOf, typename Target, typename Of>
__device__ __forceinline__ int32_t walk(const Row& row, const SumOf& sum_of, const Target& target_of, const Of& of) {
  Shared& shared = *row.shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A piece of the row for each thread, then the chunk within the piece, then the id within the chunk.
  const auto [begin, end] = row.piece();
  double own = 0;
  for (uint32_t chunk = begin; chunk < end; ++chunk) own += sum_of(chunk);
  const double in_warp = warp_prefix(own, lane);
  if (lane == 31) shared.warps[warp] = in_warp;
  if (threadIdx.x == 0) shared.first = kThreads, shared.last = 0;
  __syncthreads();  // sums of warps
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
  __syncthreads();  // first and last
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
  __syncthreads();  // the chunk
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
