// Scores of an indexer. A vector has the products of one key element with several heads, so that sums over elements
// need no shuffles, and four keys share each load of the queries.
#include "ops/index_select/kernels.h"
#include "ops/simd.h"

namespace DYNO_KERNEL_NAMESPACE {
namespace {

constexpr int kKeys = 4;

constexpr int64_t groups_of(int64_t heads) { return (heads + kLanes - 1) / kLanes; }

}  // namespace

void index_queries(const float* q, const float* weights, int64_t heads, int64_t dk, float* out) {
  const int64_t groups = groups_of(heads);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t head = g * kLanes + lane;
      const bool there = head < heads;
      for (int64_t d = 0; d < dk; ++d) out[(g * dk + d) * kLanes + lane] = there ? q[head * dk + d] : 0.0f;
      out[groups * dk * kLanes + head] = there ? weights[head] : 0.0f;
    }
  }
}

void index_scores(const float* queries, int64_t heads, int64_t dk, const std::byte* keys, int64_t row_bytes,
                  int64_t count, float* scores) {
  const int64_t groups = groups_of(heads);
  const float* weights = queries + groups * dk * kLanes;
  for (int64_t first = 0; first < count; first += kKeys) {
    // The last keys are computed again instead of keys that do not exist, so that all keys have the same code.
    const float* k[kKeys];
    for (int64_t j = 0; j < kKeys; ++j) {
      const int64_t key = first + j < count ? first + j : count - 1;
      k[j] = reinterpret_cast<const float*>(keys + key * row_bytes);
    }
    vf total[kKeys] = {};
    for (int64_t g = 0; g < groups; ++g) {
      const float* q = queries + g * dk * kLanes;
      vf sum[kKeys] = {};
      for (int64_t d = 0; d < dk; ++d) {
        const vf heads_of_d = load(q + d * kLanes);
        for (int j = 0; j < kKeys; ++j) sum[j] += broadcast(k[j][d]) * heads_of_d;
      }
      const vf w = load(weights + g * kLanes);
      for (int j = 0; j < kKeys; ++j) total[j] += w * (sum[j] < vf{} ? vf{} : sum[j]);  // NaN stays NaN
    }
    for (int64_t j = 0; j < kKeys && first + j < count; ++j) scores[first + j] = horizontal_sum(total[j]);
  }
}

}  // namespace DYNO_KERNEL_NAMESPACE
