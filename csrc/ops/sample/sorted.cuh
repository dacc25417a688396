// Top-p over a whole row without repeated reads: all blocks sort their chunks and compute prefix sums from the best of
// each on. The block that finishes the row then finds the total probability from any logit on with one lookup per
// chunk.
#pragma once

#include "ops/sample/filters.cuh"
#include "ops/sample/walk.cuh"

namespace dyno::ops::sampling {

// For all chunks, [chunks][kSampleChunk]: keys in descending order, and the sums of probabilities and of weights up to
// and including each of them, relative to the best of the chunk.
struct Sorted {
  uint32_t* keys;
  double* masses;
  double* weights;
};

// Bitonic sort over a warp with kPerLane keys per lane: in descending order over the lanes.
__device__ __forceinline__ void sort_keys(uint32_t (&keys)[kPerLane], uint32_t lane) {
#pragma unroll
  for (uint32_t size = 2; size <= kSampleChunk; size *= 2) {
#pragma unroll
    for (uint32_t distance = size / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (uint32_t i = 0; i < kPerLane; ++i) {
        const uint32_t at = lane * kPerLane + i;
        const bool falls = (at & size) == 0;
        if (distance >= kPerLane) {
          const uint32_t other = __shfl_xor_sync(device::kFullMask, keys[i], distance / kPerLane);
          const bool first = (at & distance) == 0;
          keys[i] = falls == first ? max(keys[i], other) : min(keys[i], other);
        } else if ((i & distance) == 0) {
          const uint32_t a = keys[i], b = keys[i | distance];
          keys[i] = falls ? max(a, b) : min(a, b);
          keys[i | distance] = falls ? min(a, b) : max(a, b);
        }
      }
    }
  }
}

// Sorts a chunk by a warp; `best` is the key of a finite number.
__device__ __forceinline__ void sort_chunk(const Sorted& sorted, uint32_t chunk, uint32_t (&keys)[kPerLane],
                                           uint32_t best, double inverse_temperature) {
  const uint32_t lane = threadIdx.x % 32;
  sort_keys(keys, lane);
  const size_t at = size_t{chunk} * kSampleChunk + lane * kPerLane;
  const auto top = static_cast<double>(value_of(best));
  double masses[kPerLane], weights[kPerLane];
  double mass = 0, weight = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (keys[i] > kMinusInfinity) {
      const double distance = static_cast<double>(value_of(keys[i])) - top;
      mass += exp(distance);
      weight += exp(distance * inverse_temperature);
    }
    sorted.keys[at + i] = keys[i];
    masses[i] = mass;
    weights[i] = weight;
  }
  // The sums of the previous lanes.
  mass = __shfl_up_sync(device::kFullMask, warp_prefix(mass, static_cast<int>(lane)), 1);
  weight = __shfl_up_sync(device::kFullMask, warp_prefix(weight, static_cast<int>(lane)), 1);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    sorted.masses[at + i] = lane > 0 ? mass + masses[i] : masses[i];
    sorted.weights[at + i] = lane > 0 ? weight + weights[i] : weights[i];
  }
}

// The row from its best down to a key, for the block that finishes it. A thread reads only its piece.
struct Heads {
  const Row& row;
  const Sorted& sorted;
  const double* scales;  // per chunk: the probability of its best, relative to the row's best

  // Number of keys of a chunk that reach `key`.
  __device__ __forceinline__ uint32_t count(uint32_t chunk, uint32_t key) const {
    if (row.best_of(chunk) < key) return 0;
    const bool known = chunk < kSharedMaxima;
    uint32_t low = known ? row.shared->least[chunk] : 0u;
    uint32_t high = known ? row.shared->most[chunk] : static_cast<uint32_t>(kSampleChunk);
    const uint32_t* keys = sorted.keys + size_t{chunk} * kSampleChunk;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (keys[middle] >= key) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  __device__ __forceinline__ double up_to(const double* sums, uint32_t chunk, uint32_t n) const {
    return n > 0 ? sums[size_t{chunk} * kSampleChunk + n - 1] : 0.0;
  }

  // Calls visit(chunk) for each of the thread's chunks.
  template <typename Visit>
  __device__ __forceinline__ void for_own(const Visit& visit) const {
    const auto [begin, end] = row.piece();
    for (uint32_t chunk = begin; chunk < end; ++chunk) visit(chunk);
  }

  // Every thread gets the result. It does not decrease for a smaller key, except by rounding.
  __device__ __forceinline__ double mass_from(uint32_t key) const {
    double sum = 0;
    for_own([&](uint32_t chunk) {
      const uint32_t n = count(chunk, key);
      if (chunk < kSharedMaxima) row.shared->found[chunk] = static_cast<uint8_t>(n);
      sum += scales[chunk] * up_to(sorted.masses, chunk, n);
    });
    return block_total(sum, *row.shared);
  }
  // Called after mass_from(key): the search continues only above this key, or only at or below it.
  __device__ __forceinline__ void narrow(bool above) const {
    for_own([&](uint32_t chunk) {
      if (chunk >= kSharedMaxima) return;
      (above ? row.shared->most : row.shared->least)[chunk] = row.shared->found[chunk];
    });
  }
};

// The smallest key up to `best` whose probability relative to the best one is at least `ratio`.
__device__ __forceinline__ uint32_t least_probable(uint32_t best, double ratio) {
  uint32_t low = kMinusInfinity + 1, high = best;
  const auto top = static_cast<double>(value_of(best));
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (exp(static_cast<double>(value_of(middle)) - top) >= ratio) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The tokens that top-p keeps of a whole row, and of these the ones that min-p keeps (`ratio` 0: all). Writes each
// chunk's sum of kept weights to `sums`, for walk(); except for the chunk with the cut's id, if it has one.
template <typename Weight>
__device__ Cut top_p_sorted(const Row& row, const Sorted& sorted, float p, double ratio, uint32_t best, double* sums,
                            const Weight& weight) {
  const double top = static_cast<double>(value_of(best));
  const Heads heads{row, sorted, sums};
  heads.for_own([&](uint32_t chunk) {
    const uint32_t key = row.best_of(chunk);
    sums[chunk] = key > kMinusInfinity ? exp(static_cast<double>(value_of(key)) - top) : 0.0;
    if (chunk >= kSharedMaxima) return;
    row.shared->least[chunk] = 0;
    // Chunks without a number were not sorted.
    row.shared->most[chunk] = key > kMinusInfinity ? static_cast<uint8_t>(kSampleChunk) : uint8_t{0};
  });

  uint32_t low = kMinusInfinity + 1, high = best;
  const double target = static_cast<double>(p) * heads.mass_from(low);
  heads.narrow(/*above=*/true);
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const bool reaches = heads.mass_from(middle) >= target;
    heads.narrow(reaches);
    if (reaches) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }

  Cut cut{low, kAllIds};
  const double above = heads.mass_from(low + 1);
  const auto equal = [&](uint32_t chunk) { return heads.count(chunk, low) - heads.count(chunk, low + 1); };
  int32_t own = 0;
  heads.for_own([&](uint32_t chunk) { own += static_cast<int32_t>(equal(chunk)); });
  const int32_t all = block_total(own, *row.shared);
  const double wanted = fmax(ceil((target - above) / exp(static_cast<double>(value_of(low)) - top)), 1.0);
  if (wanted < all) {
    const int32_t id = walk(
        row, [&](uint32_t chunk) { return static_cast<double>(equal(chunk)); }, [&](double) { return wanted - 0.5; },
        [&](uint32_t key, int32_t, float) { return key == low ? 1.0 : 0.0; });
    __syncthreads();  // the walk has finished with the memory that is written next
    if (threadIdx.x == 0) row.shared->first = id;
    __syncthreads();  // the id is written
    cut.id = row.shared->first;
    __syncthreads();  // all threads have read it
  }
  if (const uint32_t key = ratio > 0 ? least_probable(best, ratio) : 0; key > low) {
    cut = {key, kAllIds};
    heads.for_own([&](uint32_t chunk) {
      if (chunk >= kSharedMaxima) return;
      row.shared->most[chunk] = static_cast<uint8_t>(heads.count(chunk, low + 1));
      row.shared->least[chunk] = 0;
    });
  }
  heads.for_own([&](uint32_t chunk) {
    const bool whole = row.last_of(chunk) <= static_cast<uint32_t>(cut.id);
    const uint32_t n = heads.count(chunk, whole ? cut.key : cut.key + 1);
    sums[chunk] = n > 0 ? weight(value_of(row.best_of(chunk))) * heads.up_to(sorted.weights, chunk, n) : 0.0;
  });
  return cut;
}

}  // namespace dyno::ops::sampling
