// Selection: which Config each op of a plan runs with, per token bucket, and why.
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "plan/paths.h"
#include "plan/plan.h"
#include "profile/profile.h"

namespace dyno::plan {

inline constexpr int kBuckets = 18;  // up to 131072 rows

struct Choice {
  ops::Config config;
  std::string reason;  // "default heuristic", "profile: <origin>", "fallback: <why>"; with a path, why that
};

enum class EntryStatus : uint8_t { applied, rejected, unused };
std::string_view entry_status_name(EntryStatus status);

// The fate of a profile's entry.
struct EntryReport {
  std::string op_key;
  std::string tokens;
  EntryStatus status = EntryStatus::unused;
  std::string reason;
};

// Session settings that choose between configurations, on a GPU.
struct SelectionSettings {
  PathSettings paths;
  bool flash_attention = true;     // off: attention in float32, without tensor cores
  bool graph_concurrency = false;  // captured neighbours that depend on nothing of each other run at the same time
};

class Selection {
 public:
  // Every entry is validated alone with supports(); a bad one is reported and its op keeps the default. `plan` must
  // outlive the selection.
  Selection(const Plan& plan, const std::vector<profile::KernelEntry>& entries, const SelectionSettings& settings);

  // The op as it is launched with `rows` rows in a u-batch of that many tokens, on its path, and with which Config.
  struct Launch {
    ops::OpDesc desc;
    const ops::Config& config;
  };
  Launch launch(int32_t key, int64_t tokens, int64_t rows) const;
  // The same of a node, which may pass on its rows as tiles of halves, or get them so.
  Launch launch(const Node& node, int64_t tokens, int64_t runs, int64_t rows) const;
  // The height of these tiles (ops/half_tiles.h) that a passing of the plan takes between ops with so many rows each;
  // 0, also without a passing: float32 rows.
  int64_t tiles_between(int32_t passing, int64_t tokens, int64_t runs) const;
  // The largest of an op's nodes, if the tokens are of `runs` sequences.
  int64_t tiles_of(int32_t key, int64_t tokens, int64_t runs) const;
  // For printing, of as many rows as the tokens make.
  Choice choice(int32_t key, int64_t tokens) const;
  ops::ProductPath path_of(int32_t key, int64_t tokens) const;
  const std::vector<EntryReport>& report() const { return report_; }
  // Of u-batches of up to `ubatch` tokens: scratch that a thread of the CPU or a launch of a GPU needs, and whether any
  // op takes a variant.
  size_t scratch_of(DeviceId device, int64_t ubatch) const;
  bool takes_variant(std::string_view name, int64_t ubatch) const;
  // The workspace of each further stream for the nodes that run beside others, of u-batches of up to `tokens` tokens; 0
  // without graph_concurrency.
  size_t scratch_beside(int64_t tokens) const;

 private:
  static constexpr int kPaths = 4;  // as ops::ProductPath
  static constexpr int64_t kAnyTokens = int64_t{1} << 24;
  using Choices = std::array<std::array<Choice, kBuckets>, kPaths>;

  // Both ops of a passing, as they are launched.
  struct Ends {
    ops::OpDesc giver, reader;
    ops::Config gives, reads;
  };
  struct Handover {
    int64_t height = 0;  // of the tiles
    bool reads = false;  // the reader's configuration can read tiles
    std::string why{};   // rows stay float32, if the height is 0
  };
  static constexpr int16_t kUnknown = -1;

  // Attention of a GPU where the settings say float32, without tensor cores.
  bool without_flash(const OpUse& op) const;
  const OpUse& use(int32_t key) const { return plan_->keys[static_cast<size_t>(key)]; }
  int bucket_of(int32_t key, int64_t tokens) const;
  const std::vector<int>& branches_of(ListId list) const { return branches_[static_cast<size_t>(list)]; }
  const PathRange& path_range(int32_t key, int64_t tokens) const {
    return range_of(path_ranges_[static_cast<size_t>(key)], tokens);
  }
  ops::OpDesc bucket_desc(int32_t key, ops::ProductPath path, int bucket) const;
  // Paths that u-batches within a bucket take, of at most `ubatch` tokens.
  std::vector<ops::ProductPath> paths_in(int32_t key, int bucket, int64_t ubatch) const;
  // visit(desc, config) for everything that u-batches of up to `ubatch` tokens may launch.
  template <typename Visit>
  void for_each_launch(int64_t ubatch, const Visit& visit) const;
  // Tokens of any u-batch that the op is part of, at most; kAnyTokens: all.
  int64_t most_tokens(int32_t key) const;
  // Takes the entry for all ops with its key (selection_entries.cpp).
  EntryReport taken(const profile::KernelEntry& entry);
  EntryReport apply(int32_t key, const profile::KernelEntry& entry);
  // Tiles of halves (selection_tiles.cpp). With the configurations that were chosen, and with the defaults of both.
  Ends ends(const Passing& passing, int64_t tokens) const;
  Ends default_ends(const Passing& passing, int64_t tokens) const;
  Handover handover(const Passing& passing, Ends ends, int64_t tokens) const;
  bool one_token_each(const Passing& passing) const;
  std::string condition(const Passing& passing) const;
  // For printing: the tiles of an op, or why its rows stay float32; and where rows do because of an entry.
  std::string passes_text(int32_t key, int64_t tokens) const;
  std::string ended_passes(const profile::KernelEntry& entry) const;
  // The op that a u-batch of one token runs in the place of this one; -1: it runs this one.
  int32_t for_one_token(int32_t key) const;

  const Plan* plan_;
  PathSettings paths_;
  bool flash_attention_, graph_concurrency_;
  // Of each list and key, the nodes that may run beside others.
  std::array<std::vector<int>, kListCount> branches_;
  // Of each key: the op with one row as the settings want it, its paths, and the configurations.
  std::vector<ops::OpDesc> wanted_;
  std::vector<PathRanges> path_ranges_;
  std::vector<Choices> choices_;
  std::vector<EntryReport> report_;
  // By passing and tokens: the height of tiles, once a launch has asked for it.
  mutable std::vector<std::vector<std::atomic<int16_t>>> heights_;
};

}  // namespace dyno::plan
