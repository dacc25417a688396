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
  double weights[kFewKept];                                // of kept candidates
  uint32_t chunks[kFewCandidates];                         // that have candidates, unordered
  int count, chunk_count;
};

__device__ __forceinline__ uint32_t key_of_rank(uint64_t rank) { return static_cast<uint32_t>(rank >> 32); }
__device__ __forceinline__ uint32_t id_of_rank(uint64_t rank) { return ~static_cast<uint32_t>(rank); }

// A key that at least k chunks reach. So the k-th best of all logits is there or higher. Reading a few more chunks
// takes less time than the last steps of an exact search. Logits lie at about even distances, and keys do not. So the
// first step tests distances from the best logit.
__device__ __forceinline__ uint32_t few_bound(const Row& row, int32_t k, uint32_t best) {
  constexpr int32_t kMore = 32;
  constexpr uint32_t kSteps = Shared::kSteps;
  const auto maxima = [&](uint32_t, const auto& add) {
    for (uint32_t chunk = threadIdx.x; chunk < row.chunks; chunk += kThreads) add(row.best_of(chunk), 1);
  };
  const float top = value_of(best);
  const auto at = [&](uint32_t i) { return key_of(top - static_cast<float>(1 << (kSteps - 1 - i))); };
  const Reached found = test_keys(at, best, k, k + kMore, *row.shared, maxima);
  const uint32_t low = found.passed == 0 ? kMinusInfinity + 1 : at(found.passed - 1);
  if (found.is_enough) return low;
  const uint32_t high = found.passed < kSteps ? at(found.passed) - 1 : best;
  return last_reaching(low, high, k, k + kMore, *row.shared, maxima);
}

// Sorts the candidates for the best k to few.sorted, best first. Returns their number; if it is more than
// kFewCandidates, nothing is sorted.
__device__ __forceinline__ int sort_few(const Row& row, Few& few, int32_t k, uint32_t best) {
  if (threadIdx.x == 0) few.count = few.chunk_count = 0;
  const uint32_t bound = few_bound(row, k, best);  // has barriers after the counts
  for (uint32_t chunk = threadIdx.x; chunk < row.chunks; chunk += kThreads) {
    if (row.best_of(chunk) < bound) continue;
    const int at = atomicAdd(&few.chunk_count, 1);
    if (at < kFewCandidates) few.chunks[at] = chunk;
  }
  __syncthreads();  // all chunks
  const int chunks = few.chunk_count;
  if (chunks > kFewCandidates) return chunks;  // each has a candidate
  constexpr int kAhead = 5;                    // loads at once: in most cases all of a warp
  const auto warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int begin = warp; begin < chunks; begin += kAhead * kWarps) {
    Four fours[kAhead];
    uint32_t first[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int at = begin + j * kWarps;
      first[j] = at < chunks ? row.first_of(few.chunks[at], lane) : row.n;
      fours[j] = row.load(first[j]);  // past the row NaN, whose key reaches no bound
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const uint32_t key = key_of(fours[j].x[i]);
        if (key < bound) continue;
        const int at = atomicAdd(&few.count, 1);
        if (at < kFewCandidates) few.found[at] = rank_of(key, first[j] + static_cast<uint32_t>(i));
      }
    }
  }
  __syncthreads();  // all candidates
  const int count = few.count;
  const auto own = static_cast<int>(threadIdx.x);
  if (count <= kFewCandidates && own < count) {
    const uint64_t rank = few.found[own];
    int better = 0;
#pragma unroll 4
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
  // Sums are over kEach adjacent candidates per lane. Their terms are computed in turns, because few lanes have any.
  constexpr int kEach = kFewKept / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), first = kEach * lane;
  const float top = value_of(key_of_rank(few.sorted[0]));
  int kept = min(count, settings.top_k);
  const auto logit_of = [&](const uint64_t* ranks, int place) { return value_of(key_of_rank(ranks[place])); };
  if (settings.top_p < 1.0f) {
    for (int place = lane; place < kept; place += 32) {
      few.weights[place] = static_cast<double>(expf(logit_of(few.sorted, place) - top));
    }
    __syncwarp();  // weights
    double mass[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      mass[i] = first + i < kept ? few.weights[first + i] : 0.0;
      own += mass[i];
    }
    __syncwarp();  // weights are read; others follow
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
    few.weights[lower] = weight(logit_of(few.sorted, place));
  }
  __syncwarp();  // sorted
  double parts[kEach], own = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    parts[i] = first + i < kept ? few.weights[first + i] : 0.0;
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
