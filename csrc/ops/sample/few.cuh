// Sampling if top-k keeps a few tokens, by the block that finishes the row. All logits that can be among the best k are
// copied to shared memory and sorted there, so that no filter reads the row again.
#pragma once

#include "ops/sample/row.cuh"

namespace dyno::ops::sampling {

// The largest top-k for this method, and the maximum of candidates for it.
constexpr int32_t kFewKept = 256;
constexpr int kFewCandidates = kThreads;

struct Few {
  uint64_t found[kFewCandidates], sorted[kFewCandidates];  // ranks; `found` is unordered
  int count;
};

__device__ __forceinline__ uint32_t key_of_rank(uint64_t rank) { return static_cast<uint32_t>(rank >> 32); }
__device__ __forceinline__ uint32_t id_of_rank(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

// Sorts the candidates for the best k to few.sorted, best first. Returns their number; if it is more than
// kFewCandidates, nothing is sorted.
__device__ __forceinline__ int sort_few(const Row& row, Few& few, int32_t k, uint32_t best) {
  // At least k chunks have a logit that reaches the k-th best of the chunks' maxima. So the k-th best of all logits is
  // there or higher. Reading a few more chunks takes less time than the last steps of an exact search.
  constexpr int32_t kMore = 32;
  const uint32_t bound =
      last_reaching(kMinusInfinity + 1, best, k, k + kMore, *row.shared, [&](uint32_t, const auto& add) {
        for (uint32_t chunk = threadIdx.x; chunk < row.chunks; chunk += kThreads) add(row.best_of(chunk), 1);
      });
  if (threadIdx.x == 0) few.count = 0;
  __syncthreads();  // the count
  row.for_each(bound, [&](uint32_t key, int32_t id, float) {
    const int at = atomicAdd(&few.count, 1);
    if (at < kFewCandidates) few.found[at] = rank_of(key, static_cast<uint32_t>(id));
  });
  __syncthreads();  // all candidates
  const int count = few.count;
  const auto own = static_cast<int>(threadIdx.x);
  if (count <= kFewCandidates && own < count) {
    const uint64_t rank = few.found[own];
    int better = 0;
    for (int i = 0; i < count; ++i) better += few.found[i] > rank ? 1 : 0;
    few.sorted[better] = rank;
  }
  __syncthreads();  // sorted
  return count;
}

// Returns the token in all lanes of the warp that calls this. `count` candidates are in few.sorted; weight(logit) is
// the unnormalised probability of a kept token.
template <typename Weight>
__device__ __forceinline__ int32_t draw_few(Few& few, int count, const SampleSettings& settings, float uniform,
                                            const Weight& weight) {
  constexpr int kEach = kFewKept / 32;  // adjacent candidates per lane
  const int lane = static_cast<int>(threadIdx.x % 32), first = kEach * lane;
  const float top = value_of(key_of_rank(few.sorted[0]));
  int kept = min(count, settings.top_k);
  const auto logit_of = [&](const uint64_t* ranks, int place) { return value_of(key_of_rank(ranks[place])); };
  if (settings.top_p < 1.0f) {
    double mass[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      mass[i] = first + i < kept ? static_cast<double>(expf(logit_of(few.sorted, first + i) - top)) : 0.0;
      own += mass[i];
    }
    const double up_to = warp_prefix(own, lane);
    const double target = static_cast<double>(settings.top_p) * __shfl_sync(device::kFullMask, up_to, 31);
    double reached = up_to - own;
    int before = 0;  // for lanes that have not reached the target
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      reached += mass[i];
      before += first + i < kept && reached < target ? 1 : 0;
    }
    kept = min(kept, warp_total(before) + 1);
  }
  if (settings.min_p > 0.0f) {
    int likely = 0;
    for (int place = lane; place < kept; place += 32) {
      const double distance = static_cast<double>(logit_of(few.sorted, place)) - static_cast<double>(top);
      likely += exp(distance) >= static_cast<double>(settings.min_p) ? 1 : 0;
    }
    kept = max(warp_total(likely), 1);
  }
  // Sorts by id.
  for (int place = lane; place < kept; place += 32) {
    const uint32_t id = id_of_rank(few.sorted[place]);
    int lower = 0;
    for (int i = 0; i < kept; ++i) lower += id_of_rank(few.sorted[i]) < id ? 1 : 0;
    few.found[lower] = few.sorted[place];
  }
  __syncwarp();  // sorted
  double parts[kEach], own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    parts[i] = first + i < kept ? weight(logit_of(few.found, first + i)) : 0.0;
    own += parts[i];
  }
  const double up_to = warp_prefix(own, lane);
  const double target = static_cast<double>(uniform) * __shfl_sync(device::kFullMask, up_to, 31);
  const unsigned some = __ballot_sync(device::kFullMask, own > 0);
  const unsigned past = __ballot_sync(device::kFullMask, own > 0 && up_to > target);
  const int chosen = past != 0 ? __ffs(static_cast<int>(past)) - 1 : 31 - __clz(static_cast<int>(some | 1u));
  int32_t id = -1;
  double at = up_to - own;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (parts[i] > 0 && (id < 0 || at <= target)) id = static_cast<int32_t>(id_of_rank(few.found[first + i]));
    at += parts[i];
  }
  return __shfl_sync(device::kFullMask, id, chosen);
}

}  // namespace dyno::ops::sampling
