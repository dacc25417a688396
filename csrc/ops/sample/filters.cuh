// The tokens of a row that top-k and top-p keep. The filters do not sort: the kept tokens are all tokens above some
// logit, and the lowest ids among tokens equal to it.
#pragma once

#include "ops/sample/row.cuh"

namespace dyno::ops::sampling {

// The kept tokens: all logits above one, and among equal ones the ids up to one.
struct Cut {
  uint32_t key = 1;  // above the key of NaN
  int32_t id = kAllIds;

  __device__ __forceinline__ bool keeps(uint32_t at, int32_t which) const {
    return at > key || (at == key && which <= id);
  }
};

// `cut` raised to `key`. Of the ids with this key that `cut` keeps, only the `wanted` lowest stay.
__device__ __forceinline__ Cut raised(const Row& row, const Cut& cut, uint32_t key, int32_t wanted) {
  const auto up_to = [&](uint32_t id) {
    return row.total<int32_t>(key, [&](uint32_t at, int32_t which, float) {
      return at == key && cut.keeps(at, which) && static_cast<uint32_t>(which) <= id ? 1 : 0;
    });
  };
  Cut out{key, key == cut.key ? cut.id : kAllIds};
  if (up_to(kAllIds) <= wanted) return out;
  uint32_t first = 0, last = row.n - 1;  // binary search for the id that completes the wanted number
  while (first < last) {
    const uint32_t middle = first + (last - first) / 2;
    if (up_to(middle) < wanted) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  out.id = static_cast<int32_t>(first);
  return out;
}

__device__ __forceinline__ Cut top_k(const Row& row, int32_t k, uint32_t best) {
  // At least k chunks have a logit that reaches the k-th best of the chunks' maxima. So the k-th best of all logits is
  // there or higher.
  const uint32_t bound = last_reaching(1, best, k, *row.shared, [&](uint32_t, const auto& add) {
    for (uint32_t chunk = threadIdx.x; chunk < row.chunks; chunk += kThreads) add(row.best_of(chunk), 1);
  });
  const uint32_t key = last_reaching(bound, best, k, *row.shared, [&](uint32_t least, const auto& add) {
    row.for_each(least, [&](uint32_t at, int32_t, float) { add(at, 1); });
  });
  const auto count_from = [&](uint32_t least) {
    return row.total<int32_t>(least, [](uint32_t, int32_t, float) { return 1; });
  };
  return raised(row, Cut{}, key, k - (key < best ? count_from(key + 1) : 0));
}

// A probability relative to the best one, for prefix sums.
__device__ __forceinline__ double mass_of(float logit, float best) { return static_cast<double>(expf(logit - best)); }

__device__ __forceinline__ Cut top_p(const Row& row, const Cut& cut, float p, uint32_t best, double total) {
  const float top = value_of(best);
  const double target = static_cast<double>(p) * total;
  const auto kept_mass = [&](uint32_t at, int32_t id, float logit) {
    return cut.keeps(at, id) ? mass_of(logit, top) : 0.0;
  };
  const auto mass_from = [&](uint32_t key) { return row.total<double>(key, kept_mass); };
  // All logits below this one together have too little probability to matter; the search starts here instead of among
  // thousands of unlikely tokens.
  const double lacking = (1.0 - static_cast<double>(p)) * total / static_cast<double>(row.n);
  const uint32_t bound = key_of(static_cast<float>(static_cast<double>(top) + log(lacking) - 1.0));
  const uint32_t low = bound > cut.key && mass_from(bound) >= target ? bound : cut.key;
  if (low == cut.key && mass_from(low) < target) return cut;  // because of rounding
  const uint32_t key = last_reaching(low, best, target, *row.shared, [&](uint32_t least, const auto& add) {
    row.for_each(least, [&](uint32_t at, int32_t id, float logit) { add(at, kept_mass(at, id, logit)); });
  });
  const double above = key < best ? mass_from(key + 1) : 0.0;
  const double each = mass_of(value_of(key), top);
  const double wanted = ceil((target - above) / each);
  return raised(row, cut, key, wanted >= 1.0 ? (wanted < 2e9 ? static_cast<int32_t>(wanted) : kAllIds) : 1);
}

}  // namespace dyno::ops::sampling
