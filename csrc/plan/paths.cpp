#include "plan/paths.h"

#include <limits>

#include "core/error.h"

namespace dyno::plan {

PathSettings resolved(const PathSettings& settings) {
  PathSettings s = settings;
  const auto check = [](const char* name, int64_t tokens, int64_t most) {
    DYNO_CHECK(PlanError, tokens >= 0 && tokens <= most, "[session] ", name, " is ", tokens, "; expected 0 (never) to ",
               most, " tokens");
  };
  check("matvec_max_tokens", s.matvec_max_tokens, int64_t{1} << 16);
  check("matvec_id_max_tokens", s.matvec_id_max_tokens, int64_t{1} << 12);  // a row of blocks for each of its experts
  check("mmq_max_tokens", s.mmq_max_tokens, int64_t{1} << 20);
  check("mmq_id_max_tokens", s.mmq_id_max_tokens, int64_t{1} << 20);
  constexpr int64_t kAlways = std::numeric_limits<int64_t>::max();
  if (!ops::kDequantizeBuilt) s.mmq_max_tokens = s.mmq_id_max_tokens = kAlways;
  if (ops::kForceBlas) s.mmq_max_tokens = 0;
  return s;
}

namespace {

struct Thresholds {
  int64_t matvec, mmq;
  std::string_view matvec_name, mmq_name;
};

PathChoice choose(int64_t tokens, const Thresholds& t, bool experts) {
  if (tokens <= t.matvec) {
    return {ops::ProductPath::matvec, str_cat(tokens, " tokens <= ", t.matvec_name, " ", t.matvec)};
  }
  if (!ops::kDequantizeBuilt) return {ops::ProductPath::mmq, "this build: GGML_CUDA_FORCE_MMQ"};
  if (ops::kForceBlas && !experts) return {ops::ProductPath::dequantize, "this build: GGML_CUDA_FORCE_CUBLAS"};
  if (tokens <= t.mmq) return {ops::ProductPath::mmq, str_cat(tokens, " tokens <= ", t.mmq_name, " ", t.mmq)};
  return {ops::ProductPath::dequantize, str_cat(tokens, " tokens > ", t.mmq_name, " ", t.mmq)};
}

}  // namespace

PathChoice choose_path(const ops::OpDesc& desc, int64_t tokens, const PathSettings& s) {
  return std::visit(
      [&]<typename D>(const D& d) -> PathChoice {
        if constexpr (requires { d.path; }) {
          if (d.layout != ops::Layout::gpu) return {};
          if constexpr (requires { d.norm; }) {
            if (d.norm) return {ops::ProductPath::matvec, "a norm is part of the product"};
          }
          if constexpr (requires { d.experts; }) {
            return choose(tokens,
                          {s.matvec_id_max_tokens, s.mmq_id_max_tokens, "matvec_id_max_tokens", "mmq_id_max_tokens"},
                          true);
          } else {
            return choose(tokens, {s.matvec_max_tokens, s.mmq_max_tokens, "matvec_max_tokens", "mmq_max_tokens"},
                          false);
          }
        } else {
          return {};
        }
      },
      desc);
}

}  // namespace dyno::plan
