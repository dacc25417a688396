// A row of logits for the block that samples from it: ordered integer keys of logits, block sums in a fixed order, and
// the search for the logit from which on a sum is reached.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"
#include "ops/sample/kernels_cuda.h"

namespace dyno::ops::sampling {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kPerLane = kSampleChunk / 32;
constexpr uint32_t kSharedMaxima = 4096;  // chunks whose maxima fit into shared memory: half a million logits
constexpr int32_t kAllIds = 0x7fffffff;

// Orders logits like numbers; NaN is below all and the only one with key 0.
__device__ __forceinline__ uint32_t key_of(float x) {
  if (isnan(x)) return 0;
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);  // both zeros are equal
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}
constexpr uint32_t kMinusInfinity = 0x007fffffu;  // its key
constexpr uint32_t kInfinity = 0xff800000u;

// Higher ranks are better: a higher logit, or among equals the lower id.
__device__ __forceinline__ uint64_t rank_of(uint32_t key, uint32_t id) { return uint64_t{key} << 32 | (~id); }
__device__ __forceinline__ uint64_t warp_best(uint64_t rank) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(device::kFullMask, rank, offset);
    rank = other > rank ? other : rank;
  }
  return rank;
}
template <typename T>
__device__ __forceinline__ T warp_total(T value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(device::kFullMask, value, offset);
  return value;
}
__device__ __forceinline__ int32_t warp_total(int32_t value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(device::kFullMask, value);
#else
  return warp_total<int32_t>(value);
#endif
}
// Sum over the lanes up to and including this one.
__device__ __forceinline__ double warp_prefix(double value, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const double before = __shfl_up_sync(device::kFullMask, value, offset);
    if (lane >= offset) value += before;
  }
  return value;
}

struct Shared {
  uint32_t maxima[kSharedMaxima];
  static constexpr int kSteps = 7;
  double warps[kWarps];
  double steps[kWarps * kSteps];
  int first, last;
  bool ends;
  uint32_t chunk;
  double before;
  // For each chunk, the number of its keys that reach the searched key: lower bound, upper bound, and a value in
  // between.
  uint8_t least[kSharedMaxima], most[kSharedMaxima], found[kSharedMaxima];
};

// Every thread gets the sum. Ends with a barrier, so that the next call can follow at once.
template <typename T>
__device__ __forceinline__ T block_total(T value, Shared& shared) {
  T* warps = reinterpret_cast<T*>(shared.warps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = warp_total(value);
  if (lane == 0) warps[warp] = value;
  __syncthreads();  // all warps' sums are written
  value = warp_total(lane < kWarps ? warps[lane] : T{0});
  __syncthreads();  // … and read
  return value;
}

struct Four {
  float x[kPerLane];
};

// One row, for the block that finishes it.
struct Row {
  const float* logits;
  uint32_t n, chunks;
  bool aligned;
  const uint32_t* maxima;  // in memory
  Shared* shared;

  __device__ __forceinline__ uint32_t first_of(uint32_t chunk, int lane) const {
    return chunk * static_cast<uint32_t>(kSampleChunk) + static_cast<uint32_t>(lane * kPerLane);
  }
  __device__ __forceinline__ uint32_t last_of(uint32_t chunk) const {
    return chunk * static_cast<uint32_t>(kSampleChunk) + static_cast<uint32_t>(kSampleChunk - 1);
  }
  // The chunks of a thread, if each thread takes a piece of the row.
  struct Piece {
    uint32_t begin, end;
  };
  __device__ __forceinline__ Piece piece() const {
    const uint32_t each = (chunks + kThreads - 1) / kThreads;
    const uint32_t begin = min(threadIdx.x * each, chunks);
    return {begin, min(begin + each, chunks)};
  }
  // The logits of `first` and the next ids; past the end NaN, which is never used.
  __device__ __forceinline__ Four load(uint32_t first) const {
    Four out;
    if (aligned && first + kPerLane <= n) {
      const float4 v = *reinterpret_cast<const float4*>(logits + first);
      return {{v.x, v.y, v.z, v.w}};
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) out.x[i] = first + i < n ? logits[first + i] : __uint_as_float(0x7fc00000u);
    return out;
  }
  __device__ __forceinline__ uint32_t best_of(uint32_t chunk) const {
    return chunks <= kSharedMaxima ? shared->maxima[chunk] : __ldcg(maxima + chunk);
  }

  // Processes chunks over warps, 32 at a time with one per lane: skip(chunk) by lanes whose chunk has no key from
  // `least` on; visit(chunk) by the warp for each other chunk. The 32 chunks are far apart, because likely ids are
  // often close together.
  template <typename Skip, typename Visit>
  __device__ __forceinline__ void for_each_chunk(uint32_t least, const Skip& skip, const Visit& visit) const {
    const uint32_t lane = threadIdx.x % 32, groups = (chunks + 31) / 32;
    for (uint32_t group = threadIdx.x / 32; group < groups; group += kWarps) {
      const uint32_t chunk = lane * groups + group;
      const bool wanted = chunk < chunks && best_of(chunk) >= least;
      if (chunk < chunks && !wanted) skip(chunk);
      for (unsigned left = __ballot_sync(device::kFullMask, wanted); left != 0; left &= left - 1) {
        visit(static_cast<uint32_t>(__ffs(left) - 1) * groups + group);
      }
    }
  }
  // Calls of(key, id, logit) for all logits with keys from `least` on; `least` must be above the key of NaN.
  template <typename Of>
  __device__ __forceinline__ void for_each(uint32_t least, const Of& of) const {
    for_each_chunk(
        least, [](uint32_t) {},
        [&](uint32_t chunk) {
          const uint32_t first = first_of(chunk, threadIdx.x % 32);
          const Four four = load(first);
#pragma unroll
          for (int i = 0; i < kPerLane; ++i) {
            const uint32_t key = key_of(four.x[i]);
            if (key >= least) of(key, static_cast<int32_t>(first + i), four.x[i]);
          }
        });
  }
  // The sum of the results of of().
  template <typename T, typename Of>
  __device__ __forceinline__ T total(uint32_t least, const Of& of) const {
    T sum = 0;
    for_each(least, [&](uint32_t key, int32_t id, float logit) { sum += of(key, id, logit); });
    return block_total(sum, *shared);
  }
};

// Tests the ascending keys at(0), at(1), … up to `high`: whether the values of all keys from there on add up to
// `target`. for_each(least, add) calls add(key, value) for every key from `least` on, and may call it for others.
struct Reached {
  uint32_t passed;  // keys from at(0) on that reach it
  bool is_enough;   // the sum of the last of them is at most `enough`
};
template <typename T, typename At, typename ForEach>
__device__ __forceinline__ Reached test_keys(const At& at, uint32_t high, T target, T enough, Shared& shared,
                                             const ForEach& for_each) {
  constexpr uint32_t kSteps = Shared::kSteps;
  T* sums_of_warps = reinterpret_cast<T*>(shared.steps);
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sums[kSteps] = {};
  for_each(at(0), [&](uint32_t key, T value) {
#pragma unroll
    for (uint32_t i = 0; i < kSteps; ++i) sums[i] += key >= at(i) ? value : T{0};
  });
#pragma unroll
  for (uint32_t i = 0; i < kSteps; ++i) {
    sums[i] = warp_total(sums[i]);
    if (lane == 0) sums_of_warps[warp * kSteps + i] = sums[i];
  }
  __syncthreads();  // all warps' sums are written
  T sum = 0;
  for (int i = 0; i < kWarps && lane < kSteps; ++i) sum += sums_of_warps[i * kSteps + lane];
  const bool reaches = lane < kSteps && at(lane) <= high && sum >= target;
  const unsigned all = __ballot_sync(device::kFullMask, reaches);
  const bool is_enough = __ballot_sync(device::kFullMask, reaches && sum <= enough) != 0;
  __syncthreads();  // … and read
  return {static_cast<uint32_t>(__ffs(~all) - 1), is_enough};
}

// The largest key in [low, high] such that the values of all keys from it on add up to `target`; `low` if there is none
// above it. A step tests eight parts of the remaining range at once, because it needs as many barriers as a step that
// halves it. The search ends early at a key whose sum is at most `enough`, unless this is negative.
template <typename T, typename ForEach>
__device__ __forceinline__ uint32_t last_reaching(uint32_t low, uint32_t high, T target, T enough, Shared& shared,
                                                  const ForEach& for_each) {
  constexpr uint32_t kSteps = Shared::kSteps;
  while (low < high) {
    const uint32_t step = (high - low + kSteps) / (kSteps + 1);
    const auto at = [&](uint32_t i) { return low + (i + 1) * step; };
    const Reached found = test_keys(at, high, target, enough, shared, for_each);
    if (found.passed < kSteps) high = min(high, at(found.passed) - 1);
    low += found.passed * step;
    if (found.is_enough) break;  // the sum from `low` on is the least that reaches the target
  }
  return low;
}
template <typename T, typename ForEach>
__device__ __forceinline__ uint32_t last_reaching(uint32_t low, uint32_t high, T target, Shared& shared,
                                                  const ForEach& for_each) {
  return last_reaching(low, high, target, T{-1}, shared, for_each);
}

}  // namespace dyno::ops::sampling
