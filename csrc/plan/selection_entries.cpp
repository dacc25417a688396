// The entries of a profile: applies those that can run, and reports why the others cannot.
#include <algorithm>
#include <array>

#include "core/error.h"
#include "plan/selection.h"

namespace dyno::plan {
namespace {

// Rank of a status, for ops with one key on several devices. If one device rejects an entry, the entry is rejected. An
// op that never runs with the entry does not affect the result.
int weight_of(EntryStatus status) {
  constexpr std::array<int, 3> weights = {1, 2, 0};  // applied, rejected, unused
  return weights[static_cast<size_t>(status)];
}

// The gate weight, by which the same product is found in another list.
model::WeightId gate_of(const Node& node) {
  if (const auto* pair = std::get_if<UpGateOperands>(&node.operands)) return pair->w_gate.id;
  if (const auto* experts = std::get_if<MoeUpGateOperands>(&node.operands)) return experts->w_gate.id;
  return model::kNone;
}

}  // namespace

int64_t Selection::most_tokens(int32_t key) const {
  const OpUse& op = use(key);
  constexpr std::array kAny = {ListId::general, ListId::expanded, ListId::streamed, ListId::streamed_expanded};
  if (std::ranges::any_of(kAny, [&](ListId list) { return op.count_in(list) > 0; })) return kAnyTokens;
  if (op.count_in(ListId::batched) > 0) return kBatchedTokens;
  return op.count_in(ListId::fused) > 0 ? kFusedTokens : 1;
}

int32_t Selection::for_one_token(int32_t key) const {
  const NodeList& list = plan_->list_for(1);
  const OpUse& op = use(key);
  if (list.id != ListId::single || op.count_in(ListId::single) > 0 || op.count_in(ListId::fused) == 0) return -1;
  for (const Node& node : plan_->fused.nodes) {
    const model::WeightId gate = gate_of(node);
    if (node.key != key || gate == model::kNone) continue;
    for (const Node& other : list.nodes) {
      const auto* experts = std::get_if<MoeUpGateOperands>(&other.operands);
      if (experts != nullptr && (experts->w_gate.id == gate || experts->shared_gate.id == gate)) return other.key;
    }
  }
  return -1;
}

EntryReport Selection::taken(const profile::KernelEntry& entry) {
  EntryReport report{.op_key = entry.op_key, .tokens = entry.tokens, .reason = "no op of this model has this key"};
  bool found = false;
  for (int32_t k = 0; k < static_cast<int32_t>(plan_->keys.size()); ++k) {
    if (use(k).key != entry.op_key) continue;
    EntryReport own = apply(k, entry);
    if (!found || weight_of(own.status) > weight_of(report.status)) report = std::move(own);
    found = true;
  }
  return report;
}

// An entry is applied completely or not at all. If one band cannot run it on any path of its u-batches, it is rejected
// for all bands.
EntryReport Selection::apply(int32_t key, const profile::KernelEntry& entry) {
  EntryReport report{.op_key = entry.op_key, .tokens = entry.tokens, .reason = {}};
  // An op never runs with more tokens than its list.
  const int64_t rows = use(key).rows_factor, most = most_tokens(key) * rows;
  const int bucket = std::min({entry.last_bucket, kBuckets - 1, ops::bucket_of(most)});
  if (entry.first_bucket > bucket) {
    report.reason = str_cat(entry.origin, ": this op never has more than ", most, most > 1 ? " rows" : " row");
    return report;
  }
  // A u-batch of one token may run another op instead.
  const int32_t replaced = for_one_token(key);
  const int named = band_of(ops::bucket_range(entry.first_bucket).first);
  const int last = band_of(std::min(ops::bucket_range(bucket).second, most));
  const int first = std::max(named, replaced < 0 ? 0 : band_of(2 * rows));
  const std::string one_token = replaced < 0 ? "" : str_cat("one token runs ", use(replaced).key, " instead");
  if (first > last) {
    report.reason = str_cat(entry.origin, ": ", one_token);
    return report;
  }
  ops::Config config{};
  std::string why;
  std::vector<std::pair<int, ops::ProductPath>> places;
  for (int band = first; band <= last && why.empty(); ++band) {
    std::string refusal;
    bool taken = false;
    for (const ops::ProductPath path : paths_in(key, band, kAnyTokens)) {
      const ops::OpDesc desc = band_desc(key, path, band);
      try {
        config = ops::config_from_entries(ops::family_of(desc), entry.config);
        const ops::Support support = ops::supports(desc, config, plan_->device(use(key).device));
        if (support) {
          places.emplace_back(band, path);
          taken = true;
        } else {
          refusal = str_cat("with ", ops::bucket_name(ops::bucket_of(band_range(band).second)),
                            " rows: ", without_flash(use(key)) ? "flash_attention is off: " : "", support.reason);
        }
      } catch (const ProfileError& error) {
        refusal = error.what();
      }
    }
    if (!taken) why = refusal;
  }
  report.status = why.empty() ? EntryStatus::applied : EntryStatus::rejected;
  report.reason = why.empty() ? entry.origin : str_cat(entry.origin, ": ", why);
  Choices& choices = choices_[static_cast<size_t>(key)];
  if (why.empty()) {
    for (const auto& [band, path] : places) {
      choices[static_cast<size_t>(path)][static_cast<size_t>(band)] = {config, "profile: " + entry.origin};
    }
    if (first > named) report.reason += "; " + one_token;
    return report;
  }
  for (int band = first; band <= last; ++band) {
    for (const ops::ProductPath path : paths_in(key, band, kAnyTokens)) {
      choices[static_cast<size_t>(path)][static_cast<size_t>(band)].reason = "fallback: " + report.reason;
    }
  }
  return report;
}

}  // namespace dyno::plan
