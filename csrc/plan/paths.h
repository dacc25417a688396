// The path of a matrix product on a GPU (matvec, mmq, dequantize), by the number of tokens in the u-batch.
#pragma once

#include <string>
#include <vector>

#include "ops/registry.h"

namespace dyno::plan {

// Session settings. Defaults were measured on an H200 (docs/explain/kernels.md).
struct PathSettings {
  int64_t matvec_max_tokens = 16;    // dense: up to this many tokens take path matvec
  int64_t matvec_id_max_tokens = 8;  // the same with experts
  int64_t mmq_max_tokens = 65536;    // dense: above matvec and up to this many, path mmq; more tokens take path
                                     // dequantize
  int64_t mmq_id_max_tokens = 65536;
  ops::ComputeType compute = ops::ComputeType::f16;  // of path dequantize
  friend bool operator==(const PathSettings&, const PathSettings&) = default;
};
// The thresholds that this build uses, without path dequantize or with cuBLAS wherever possible. Throws PlanError for a
// value that is not a number of tokens.
PathSettings resolved(const PathSettings& settings);

// The path of u-batches with more tokens than the previous range, up to `last_tokens`.
struct PathRange {
  int64_t last_tokens = 0;
  ops::ProductPath path = ops::ProductPath::any;
  std::string reason{};  // "tokens <= mmq_max_tokens 1024"; empty if there is no choice
};
// At most three ranges, which together cover every number of tokens. Ops that are not products, and weights in the
// file's layout, have one range with the path `any`.
using PathRanges = std::vector<PathRange>;
PathRanges path_ranges(const ops::OpDesc& desc, const PathSettings& settings);
inline const PathRange& range_of(const PathRanges& ranges, int64_t tokens) {
  const PathRange* range = ranges.data();
  while (range->last_tokens < tokens) ++range;
  return *range;
}

}  // namespace dyno::plan
