#include "plan/paths.h"

#include <limits>

#include "core/error.h"

namespace dyno::plan {
namespace {

constexpr int64_t kAlways = std::numeric_limits<int64_t>::max();

}  // namespace

PathSettings resolved(const PathSettings& settings) {
  PathSettings s = settings;
  const auto check = [](const char* name, int64_t tokens, int64_t most) {
    DYNO_CHECK(PlanError, tokens >= 0 && tokens <= most, "[session] ", name, " is ", tokens, "; expected 0 (never) to ",
               most, " tokens");
  };
  check("matvec_max_tokens", s.matvec_max_tokens, int64_t{1} << 16);
  check("matvec_id_max_tokens", s.matvec_id_max_tokens, int64_t{1} << 12);  // the grid has a row of blocks for each
                                                                            // expert of each token
  check("mmq_max_tokens", s.mmq_max_tokens, int64_t{1} << 20);
  check("mmq_id_max_tokens", s.mmq_id_max_tokens, int64_t{1} << 20);
  if (!ops::kDequantizeBuilt) s.mmq_max_tokens = s.mmq_id_max_tokens = kAlways;
  if (ops::kForceBlas) s.mmq_max_tokens = 0;
  return s;
}

namespace {

struct Thresholds {
  int64_t matvec, mmq;
  std::string_view matvec_name, mmq_name;
};

PathRanges ranges_between(const Thresholds& t, bool experts) {
  PathRanges ranges;
  const auto add = [&](int64_t last, ops::ProductPath path, std::string reason) {
    const int64_t before = ranges.empty() ? 0 : ranges.back().last_tokens;
    if (last > before) ranges.push_back({last, path, std::move(reason)});
  };
  add(t.matvec, ops::ProductPath::matvec, str_cat("tokens <= ", t.matvec_name, " ", t.matvec));
  if (!ops::kDequantizeBuilt) {
    add(kAlways, ops::ProductPath::mmq, "this build: GGML_CUDA_FORCE_MMQ");
  } else if (ops::kForceBlas && !experts) {
    add(kAlways, ops::ProductPath::dequantize, "this build: GGML_CUDA_FORCE_CUBLAS");
  } else {
    add(t.mmq, ops::ProductPath::mmq, str_cat("tokens <= ", t.mmq_name, " ", t.mmq));
    add(kAlways, ops::ProductPath::dequantize, str_cat("tokens > ", t.mmq_name, " ", t.mmq));
  }
  return ranges;
}

}  // namespace

PathRanges path_ranges(const ops::OpDesc& desc, const PathSettings& s) {
  const PathRanges no_choice = {{kAlways, ops::ProductPath::any}};
  return std::visit(
      [&]<typename D>(const D& d) -> PathRanges {
        if constexpr (requires { d.path; }) {
          if (d.layout != ops::Layout::gpu) return no_choice;
          if constexpr (requires { d.norm; }) {
            if (d.norm) return {{kAlways, ops::ProductPath::matvec, "a norm is part of the product"}};
          }
          if constexpr (requires { d.experts; }) {
            return ranges_between(
                {s.matvec_id_max_tokens, s.mmq_id_max_tokens, "matvec_id_max_tokens", "mmq_id_max_tokens"}, true);
          } else {
            return ranges_between({s.matvec_max_tokens, s.mmq_max_tokens, "matvec_max_tokens", "mmq_max_tokens"},
                                  false);
          }
        } else {
          return no_choice;
        }
      },
      desc);
}

}  // namespace dyno::plan
