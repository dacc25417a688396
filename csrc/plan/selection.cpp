#include "plan/selection.h"

#include <algorithm>

#include "core/error.h"

namespace dyno::plan {

std::string_view entry_status_name(EntryStatus status) {
  constexpr std::array<std::string_view, 3> names = {"applied", "rejected", "unused"};
  return names[static_cast<size_t>(status)];
}

Selection::Selection(const Plan& plan, const std::vector<profile::KernelEntry>& entries) {
  choices_.resize(plan.keys.size());
  for (size_t k = 0; k < plan.keys.size(); ++k) {
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      // A bucket's upper end stands for all of it.
      const ops::OpDesc desc = ops::with_tokens(plan.keys[k].desc, ops::bucket_range(bucket).second);
      choices_[k][static_cast<size_t>(bucket)] = {ops::default_config(desc, plan.device), "default heuristic"};
    }
  }

  for (const profile::KernelEntry& entry : entries) {
    EntryReport report{.op_key = entry.op_key, .tokens = entry.tokens, .reason = "no op of this model has this key"};
    const int last = std::min(entry.last_bucket, kBuckets - 1);
    for (size_t k = 0; k < plan.keys.size(); ++k) {
      if (plan.keys[k].key != entry.op_key) continue;
      // Beyond its list's tokens an op never runs.
      const bool few = plan.keys[k].count_in(ListId::general) == 0;
      const int end = few ? std::min(last, ops::bucket_of(kFusedTokens * plan.keys[k].rows_factor)) : last;
      // An entry is taken whole or not at all: one bucket that cannot run it rejects it for all of them.
      ops::Config config{};
      std::string why;
      for (int bucket = entry.first_bucket; bucket <= end && why.empty(); ++bucket) {
        const ops::OpDesc desc = ops::with_tokens(plan.keys[k].desc, ops::bucket_range(bucket).second);
        try {
          config = ops::config_from_entries(ops::family_of(desc), entry.config);
          const ops::Support support = ops::supports(desc, config, plan.device);
          if (!support) why = str_cat("with ", ops::bucket_name(bucket), " rows: ", support.reason);
        } catch (const ProfileError& error) {
          why = error.what();
        }
      }
      report.status = why.empty() ? EntryStatus::applied : EntryStatus::rejected;
      report.reason = why.empty() ? entry.origin : str_cat(entry.origin, ": ", why);
      for (int bucket = entry.first_bucket; bucket <= end; ++bucket) {
        Choice& choice = choices_[k][static_cast<size_t>(bucket)];
        if (why.empty()) {
          choice = {config, "profile: " + entry.origin};
        } else {
          choice.reason = "fallback: " + report.reason;
        }
      }
    }
    report_.push_back(std::move(report));
  }
}

size_t Selection::scratch_per_thread(const Plan& plan, int64_t ubatch) const {
  size_t most = 0;
  for (size_t k = 0; k < plan.keys.size(); ++k) {
    const OpUse& use = plan.keys[k];
    if (use.count_in(ListId::expanded) > 0 && !plan.expands() && use.count_in(ListId::general) == 0 &&
        use.count_in(ListId::fused) == 0) {
      continue;
    }
    const bool few = use.count_in(ListId::general) == 0 && use.count_in(ListId::expanded) == 0;
    const int64_t rows = (few ? std::min(ubatch, kFusedTokens) : ubatch) * plan.keys[k].rows_factor;
    for (int bucket = 0; bucket <= std::min(ops::bucket_of(rows), kBuckets - 1); ++bucket) {
      const int64_t m = std::min(rows, ops::bucket_range(bucket).second);
      most = std::max(most, ops::scratch_bytes(ops::with_tokens(plan.keys[k].desc, m),
                                               choice(static_cast<int32_t>(k), bucket).config));
    }
  }
  return (most + 63) / 64 * 64;
}

}  // namespace dyno::plan
