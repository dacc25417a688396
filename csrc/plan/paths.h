// Which of the three ways a matrix product goes on a GPU, by the number of tokens of the u-batch that runs.
#pragma once

#include <string>
#include <vector>

#include "ops/registry.h"

namespace dyno::plan {

// Session settings. Defaults were measured on an H200 (docs/explain/kernels.md).
struct PathSettings {
  int64_t matvec_max_tokens = 16;    // dense: at most this many tokens are matvec's
  int64_t matvec_id_max_tokens = 8;  // the same with experts
  int64_t mmq_max_tokens = 65536;    // dense: at most this many are mmq's, above matvec; larger ones dequantize
  int64_t mmq_id_max_tokens = 65536;
  ops::ComputeType compute = ops::ComputeType::f16;  // of path dequantize
  friend bool operator==(const PathSettings&, const PathSettings&) = default;
};
// The thresholds as this build takes them: without path dequantize, or with cuBLAS wherever it can. Throws PlanError
// for a value that is no number of tokens.
PathSettings resolved(const PathSettings& settings);

// The path of u-batches with more tokens than the range before has, up to `last_tokens`.
struct PathRange {
  int64_t last_tokens = 0;
  ops::ProductPath path = ops::ProductPath::any;
  std::string reason{};  // "tokens <= mmq_max_tokens 1024"; empty where there is nothing to choose
};
// Every number of tokens is in one of the ranges, of which there are at most three. Ops that are no products, and
// weights in the file's layout, have one with the path `any`.
using PathRanges = std::vector<PathRange>;
PathRanges path_ranges(const ops::OpDesc& desc, const PathSettings& settings);
inline const PathRange& range_of(const PathRanges& ranges, int64_t tokens) {
  const PathRange* range = ranges.data();
  while (range->last_tokens < tokens) ++range;
  return *range;
}

}  // namespace dyno::plan
