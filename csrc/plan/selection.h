// Selection: which Config each op of a plan runs with, per token bucket, and why.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "profile/profile.h"

namespace dyno::plan {

inline constexpr int kBuckets = 18;  // up to 131072 rows

struct Choice {
  ops::Config config;
  std::string reason;  // "default heuristic", "profile: <origin>", "fallback: <why>"
};

enum class EntryStatus : uint8_t { applied, rejected, unused };
std::string_view entry_status_name(EntryStatus status);

// What became of a profile's entry.
struct EntryReport {
  std::string op_key;
  std::string tokens;
  EntryStatus status = EntryStatus::unused;
  std::string reason;
};

class Selection {
 public:
  // Every entry is validated alone with supports(); a bad one is reported and its op keeps the default.
  Selection(const Plan& plan, const std::vector<profile::KernelEntry>& entries);

  const Choice& choice(int32_t key, int bucket) const {
    return choices_[static_cast<size_t>(key)][static_cast<size_t>(bucket)];
  }
  const std::vector<EntryReport>& report() const { return report_; }
  // Scratch a thread needs for any op at up to `ubatch` tokens.
  size_t scratch_per_thread(const Plan& plan, int64_t ubatch) const;

 private:
  std::vector<std::array<Choice, kBuckets>> choices_;
  std::vector<EntryReport> report_;
};

}  // namespace dyno::plan
