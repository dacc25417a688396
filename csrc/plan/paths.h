// Which of the three ways a matrix product goes on a GPU, by the number of tokens of the u-batch that runs.
#pragma once

#include <string>

#include "ops/registry.h"

namespace dyno::plan {

// Session settings. Defaults were measured on an H200 (docs/cuda-products.md).
struct PathSettings {
  int64_t matvec_max_tokens = 16;    // dense: at most this many tokens are matvec's
  int64_t matvec_id_max_tokens = 8;  // the same with experts
  int64_t mmq_max_tokens = 65536;    // dense: at most this many are mmq's, above matvec; larger ones dequantize
  int64_t mmq_id_max_tokens = 65536;
  ops::ComputeType compute = ops::ComputeType::f16;  // of path dequantize
  friend bool operator==(const PathSettings&, const PathSettings&) = default;
};
// What this build makes of them: without path dequantize, or with cuBLAS wherever it can. Throws PlanError for a value
// that is no number of tokens.
PathSettings resolved(const PathSettings& settings);

struct PathChoice {
  ops::ProductPath path = ops::ProductPath::any;
  std::string reason;  // "512 tokens <= mmq_max_tokens 1024"; empty where there is nothing to choose
};
// `any` for ops that are no products and for weights in the file's layout.
PathChoice choose_path(const ops::OpDesc& desc, int64_t tokens, const PathSettings& settings);

}  // namespace dyno::plan
