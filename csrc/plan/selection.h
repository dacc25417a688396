// Selection: the Config of each op of a plan, per band of token counts, and the reason.
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

// A band is a bucket, or a part of one: two, three and four rows have defaults of their own. An entry of a profile
// names buckets, so it covers all three.
inline constexpr int kBands = kBuckets + 2;
int band_of(int64_t rows);
std::pair<int64_t, int64_t> band_range(int band);  // inclusive

struct Choice {
  ops::Config config;
  std::string reason;  // "default heuristic", "profile: <origin>" or "fallback: <why>"; then the reason for the path,
                       // if it has one
};

enum class EntryStatus : uint8_t { applied, rejected, unused };
std::string_view entry_status_name(EntryStatus status);

// The outcome of a profile's entry.
struct EntryReport {
  std::string op_key;
  std::string tokens;
  EntryStatus status = EntryStatus::unused;
  std::string reason;
};

// Session settings that affect the choice of configurations on a GPU.
struct SelectionSettings {
  PathSettings paths;
  bool flash_attention = true;     // off: attention in float32, without tensor cores
  bool graph_concurrency = false;  // captured neighbours that are independent of each other run concurrently
};

class Selection {
 public:
  // Validates every entry separately with supports(). A bad entry is reported, and its op keeps the default. `plan`
  // must outlive the selection.
  Selection(const Plan& plan, const std::vector<profile::KernelEntry>& entries, const SelectionSettings& settings);

  // The op for a launch with `rows` rows in a u-batch of `tokens` tokens, with its path, and its Config.
  struct Launch {
    ops::OpDesc desc;
    const ops::Config& config;
  };
  Launch launch(int32_t key, int64_t tokens, int64_t rows) const;
  // The same for a node, which may write or read its rows as f16 tiles. `depth`: upper bound of the sequences'
  // positions.
  Launch launch(const Node& node, int64_t tokens, int64_t runs, int64_t rows, int64_t depth) const;
  // The height of the f16 tiles (ops/half_tiles.h) that two ops exchange for this many tokens; 0 if they exchange
  // float32 rows or `passing` is -1. Attention over deep contexts divides the keys, and then writes rows.
  int64_t tiles_between(int32_t passing, int64_t tokens, int64_t runs, int64_t depth) const;
  // The largest height over the nodes of an op, if the tokens belong to `runs` sequences with short contexts.
  int64_t tiles_of(int32_t key, int64_t tokens, int64_t runs) const;
  // For printing: the choice for this many tokens.
  Choice choice(int32_t key, int64_t tokens) const;
  ops::ProductPath path_of(int32_t key, int64_t tokens) const;
  const std::vector<EntryReport>& report() const { return report_; }
  // For u-batches of up to `ubatch` tokens: the scratch that a CPU thread or a GPU launch needs, and whether any op
  // uses a variant.
  size_t scratch_of(DeviceId device, int64_t ubatch) const;
  bool takes_variant(std::string_view name, int64_t ubatch) const;
  // The workspace of each additional stream for nodes that run concurrently, for u-batches of up to `tokens` tokens; 0
  // without graph_concurrency.
  size_t scratch_beside(int64_t tokens) const;

 private:
  static constexpr int kPaths = 4;  // as ops::ProductPath
  static constexpr int64_t kAnyTokens = int64_t{1} << 24;
  using Choices = std::array<std::array<Choice, kBands>, kPaths>;

  // Both ops of a passing with their configurations.
  struct Ends {
    ops::OpDesc giver, reader;
    ops::Config gives, reads;
  };
  struct Handover {
    int64_t height = 0;  // of the tiles
    bool reads = false;  // the reader's configuration supports tiles
    std::string why{};   // the reason that rows stay float32, if the height is 0
  };
  static constexpr int16_t kUnknown = -1;

  // Whether this is attention on a GPU that the settings restrict to float32, without tensor cores.
  bool without_flash(const OpUse& op) const;
  const OpUse& use(int32_t key) const { return plan_->keys[static_cast<size_t>(key)]; }
  int band_of_op(int32_t key, int64_t tokens) const;
  const std::vector<int>& branches_of(ListId list) const { return branches_[static_cast<size_t>(list)]; }
  const PathRange& path_range(int32_t key, int64_t tokens) const {
    return range_of(path_ranges_[static_cast<size_t>(key)], tokens);
  }
  ops::OpDesc band_desc(int32_t key, ops::ProductPath path, int band) const;
  // The paths of u-batches within a band, up to `ubatch` tokens.
  std::vector<ops::ProductPath> paths_in(int32_t key, int band, int64_t ubatch) const;
  // Calls visit(desc, config) for every launch that u-batches of up to `ubatch` tokens may need.
  template <typename Visit>
  void for_each_launch(int64_t ubatch, const Visit& visit) const;
  // The maximum of tokens in a u-batch that includes the op; kAnyTokens: no limit.
  int64_t most_tokens(int32_t key) const;
  // Applies the entry to all ops with its key (selection_entries.cpp).
  EntryReport taken(const profile::KernelEntry& entry);
  EntryReport apply(int32_t key, const profile::KernelEntry& entry);
  // f16 tiles (selection_tiles.cpp), with the chosen configurations and with the defaults of both ops.
  Ends ends(const Passing& passing, int64_t tokens) const;
  Ends default_ends(const Passing& passing, int64_t tokens) const;
  Handover handover(const Passing& passing, Ends ends, int64_t tokens) const;
  bool one_token_each(const Passing& passing) const;
  std::string condition(const Passing& passing) const;
  // For printing: the tiles of an op or the reason that its rows stay float32; and the rows that stay float32 because
  // of an entry.
  std::string passes_text(int32_t key, int64_t tokens) const;
  std::string ended_passes(const profile::KernelEntry& entry) const;
  // The op that a u-batch of one token runs instead of this one; -1: this one.
  int32_t for_one_token(int32_t key) const;

  const Plan* plan_;
  PathSettings paths_;
  bool flash_attention_, graph_concurrency_;
  // For each list and key, the number of nodes that may run concurrently with others.
  std::array<std::vector<int>, kListCount> branches_;
  // For each key: the op with one row under the settings, its paths, and its configurations.
  std::vector<ops::OpDesc> wanted_;
  std::vector<PathRanges> path_ranges_;
  std::vector<Choices> choices_;
  std::vector<EntryReport> report_;
  // By passing and tokens: the height of tiles, cached at the first request.
  mutable std::vector<std::vector<std::atomic<int16_t>>> heights_;
};

}  // namespace dyno::plan
