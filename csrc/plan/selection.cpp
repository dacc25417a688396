#include "plan/selection.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "ops/neighbours.h"

namespace dyno::plan {

std::string_view entry_status_name(EntryStatus status) {
  constexpr std::array<std::string_view, 3> names = {"applied", "rejected", "unused"};
  return names[static_cast<size_t>(status)];
}

namespace {

bool only_expanded(const OpUse& use) {
  constexpr std::array kOthers = {ListId::general, ListId::fused, ListId::single, ListId::batched, ListId::streamed};
  return use.count_in(ListId::expanded) + use.count_in(ListId::streamed_expanded) > 0 &&
         std::ranges::all_of(kOthers, [&](ListId list) { return use.count_in(list) == 0; });
}

constexpr int64_t kOwnBands = 4;  // up to this number of rows, each has a band of its own

size_t index_of(ops::ProductPath path) { return static_cast<size_t>(path); }

// Without flash attention, a GPU runs what numerics=exact runs: queries, weights and sums in float32. So keys and
// values that would be f16 pairs are float32, too.
ops::OpDesc wanted_desc(ops::OpDesc desc, bool flash_attention, ops::ComputeType compute) {
  if (!flash_attention) {
    if (auto* attention = std::get_if<ops::AttentionDesc>(&desc)) attention->exact = true, attention->paired = false;
    if (auto* expansion = std::get_if<ops::MlaExpandDesc>(&desc)) expansion->paired = false;
  }
  return ops::with_path(desc, ops::ProductPath::any, compute);
}

// For each key, the launches before its ops in the lists of a single token.
std::vector<ops::Neighbours> neighbours_in(const Plan& plan) {
  std::vector<ops::Neighbours> out(plan.keys.size());
  for (const NodeList* list : {&plan.fused, &plan.single}) {
    for (size_t i = 1; i < list->nodes.size(); ++i) {
      const auto* before = std::get_if<ops::MatmulDesc>(&list->nodes[i - 1].desc);
      if (before != nullptr && before->batch > 1) out[static_cast<size_t>(list->nodes[i].key)].after_batch = true;
    }
  }
  return out;
}

}  // namespace

int band_of(int64_t rows) {
  if (rows >= 1 && rows <= kOwnBands) return static_cast<int>(rows) - 1;
  return std::min(ops::bucket_of(rows), kBuckets - 1) + kBands - kBuckets;
}

std::pair<int64_t, int64_t> band_range(int band) {
  if (band < kOwnBands) return {band + 1, band + 1};
  return ops::bucket_range(band - (kBands - kBuckets));
}

Selection::Selection(const Plan& plan, const std::vector<profile::KernelEntry>& entries,
                     const SelectionSettings& settings)
    : plan_(&plan),
      paths_(resolved(settings.paths)),
      flash_attention_(settings.flash_attention),
      graph_concurrency_(settings.graph_concurrency && plan.main_device().kind == DeviceKind::cuda),
      choices_(plan.keys.size()) {
  const auto keys = static_cast<int32_t>(plan.keys.size());
  for (const NodeList* list : {&plan.general, &plan.fused, &plan.single, &plan.batched}) {
    std::vector<int>& branches = branches_[static_cast<size_t>(list->id)];
    branches.resize(plan.keys.size());
    const std::vector<Node>& nodes = list->nodes;
    for (size_t i = 0; i < nodes.size(); ++i) {
      const bool first = i + 1 < nodes.size() && nodes[i + 1].beside;
      if (first || nodes[i].beside) ++branches[static_cast<size_t>(nodes[i].key)];
    }
  }
  for (const OpUse& op : plan.keys) {
    const bool gpu = plan.device(op.device).kind == DeviceKind::cuda;
    wanted_.push_back(wanted_desc(op.desc, flash_attention_ || !gpu, paths_.compute));
    path_ranges_.push_back(path_ranges(op.desc, paths_));
  }
  const std::vector<ops::Neighbours> neighbours = neighbours_in(plan);
  for (int32_t k = 0; k < keys; ++k) {
    for (int band = 0; band < kBands; ++band) {
      for (const ops::ProductPath path : paths_in(k, band, kAnyTokens)) {
        choices_[static_cast<size_t>(k)][index_of(path)][static_cast<size_t>(band)] = {
            ops::default_config(band_desc(k, path, band), plan.device(use(k).device),
                                neighbours[static_cast<size_t>(k)]),
            "default heuristic"};
      }
    }
  }
  for (size_t i = 0; i < plan.passings.size(); ++i) {
    std::vector<std::atomic<int16_t>>& heights = heights_.emplace_back(static_cast<size_t>(plan.ubatch) + 1);
    for (std::atomic<int16_t>& height : heights) height = kUnknown;
  }
  for (const profile::KernelEntry& entry : entries) report_.push_back(taken(entry));
  for (size_t i = 0; i < entries.size(); ++i) {
    if (report_[i].status == EntryStatus::applied) report_[i].reason += ended_passes(entries[i]);
  }
}

int Selection::band_of_op(int32_t key, int64_t tokens) const { return band_of(tokens * use(key).rows_factor); }

ops::ProductPath Selection::path_of(int32_t key, int64_t tokens) const { return path_range(key, tokens).path; }

// The upper end of a band represents the whole band.
ops::OpDesc Selection::band_desc(int32_t key, ops::ProductPath path, int band) const {
  return ops::with_path(ops::with_tokens(wanted_[static_cast<size_t>(key)], band_range(band).second), path,
                        paths_.compute);
}

std::vector<ops::ProductPath> Selection::paths_in(int32_t key, int band, int64_t ubatch) const {
  const auto [low, high] = band_range(band);
  const int64_t rows = use(key).rows_factor, first = (low + rows - 1) / rows;
  const int64_t last = std::max(first, std::min(high / rows, ubatch));
  // As the tokens grow, the path changes in one direction only.
  std::vector<ops::ProductPath> out = {path_of(key, first)};
  if (const ops::ProductPath path = path_of(key, last); path != out.back()) {
    if (out.back() == ops::ProductPath::matvec && path == ops::ProductPath::dequantize) {
      out.push_back(ops::ProductPath::mmq);
    }
    out.push_back(path);
  }
  return out;
}

Selection::Launch Selection::launch(int32_t key, int64_t tokens, int64_t rows) const {
  const auto at = static_cast<size_t>(key);
  const ops::ProductPath path = path_of(key, tokens);
  Launch launch{wanted_[at], choices_[at][index_of(path)][static_cast<size_t>(band_of(rows))].config};
  std::visit(
      [&](auto& d) {
        d.m = rows;
        if constexpr (requires { d.path; }) d.path = path;
      },
      launch.desc);
  return launch;
}

Selection::Launch Selection::launch(const Node& node, int64_t tokens, int64_t runs, int64_t rows, int64_t depth) const {
  Launch own = launch(node.key, tokens, rows);
  if (node.gives >= 0) {
    const int64_t tiles = tiles_between(node.gives, tokens, runs, depth);
    if (auto* up_gate = std::get_if<ops::UpGateDesc>(&own.desc)) up_gate->y_tiles = tiles;
    if (auto* attention = std::get_if<ops::AttentionDesc>(&own.desc)) attention->out_tiles = tiles;
  }
  if (node.gets >= 0) std::get<ops::MatmulDesc>(own.desc).x_tiles = tiles_between(node.gets, tokens, runs, depth);
  return own;
}

Choice Selection::choice(int32_t key, int64_t tokens) const {
  const PathRange& path = path_range(key, tokens);
  Choice choice = choices_[static_cast<size_t>(key)][index_of(path.path)][static_cast<size_t>(band_of_op(key, tokens))];
  if (path.path != ops::ProductPath::any) {
    choice.reason += str_cat("; path ", ops::product_path_name(path.path), ": ", path.reason);
  }
  if (without_flash(use(key))) {
    choice.reason += "; flash_attention is off: float32, no tensor cores";
  }
  const NodeList& list = plan_->list_for(tokens);
  choice.reason += passes_text(key, tokens);
  if (graph_concurrency_ && !branches_of(list.id).empty()) {
    const int branches = branches_of(list.id)[static_cast<size_t>(key)];
    if (branches > 0) {
      choice.reason += str_cat("; graph_concurrency: ", branches, " of ", use(key).count_in(list.id),
                               " captured to run concurrently with other products of their input");
    }
  }
  return choice;
}

bool Selection::without_flash(const OpUse& op) const {
  return std::holds_alternative<ops::AttentionDesc>(op.desc) && !flash_attention_ &&
         plan_->device(op.device).kind == DeviceKind::cuda;
}

template <typename Visit>
void Selection::for_each_launch(int64_t ubatch, const Visit& visit) const {
  for (int32_t k = 0; k < static_cast<int32_t>(plan_->keys.size()); ++k) {
    if (only_expanded(use(k)) && !plan_->expands()) continue;
    const int64_t tokens = std::min(ubatch, most_tokens(k));
    const int64_t rows = tokens * use(k).rows_factor;
    for (int band = 0; band <= band_of(rows); ++band) {
      const int64_t m = std::min(rows, band_range(band).second);
      for (const ops::ProductPath path : paths_in(k, band, tokens)) {
        const Choices& choices = choices_[static_cast<size_t>(k)];
        visit(k, ops::with_path(ops::with_tokens(wanted_[static_cast<size_t>(k)], m), path, paths_.compute),
              choices[index_of(path)][static_cast<size_t>(band)].config);
      }
    }
  }
}

size_t Selection::scratch_of(DeviceId device, int64_t ubatch) const {
  size_t most = 0;
  for_each_launch(ubatch, [&](int32_t key, const ops::OpDesc& desc, const ops::Config& config) {
    if (use(key).device == device) most = std::max(most, ops::scratch_bytes(desc, config));
  });
  return (most + 63) / 64 * 64;
}

size_t Selection::scratch_beside(int64_t tokens) const {
  size_t most = 0;
  if (!graph_concurrency_) return most;
  for_each_launch(tokens, [&](int32_t key, const ops::OpDesc& desc, const ops::Config& config) {
    const auto at = static_cast<size_t>(key);
    int branches = 0;
    for (const ListId list : {ListId::general, ListId::fused, ListId::single, ListId::batched}) {
      branches += branches_of(list)[at];
    }
    // A stream always has some workspace, so that a launch that needs none still gets an address.
    if (branches > 0) most = std::max({most, ops::scratch_bytes(desc, config), size_t{256}});
  });
  return (most + 255) / 256 * 256;
}

bool Selection::takes_variant(std::string_view name, int64_t ubatch) const {
  bool takes = false;
  for_each_launch(ubatch, [&](int32_t, const ops::OpDesc& desc, const ops::Config& config) {
    takes |= ops::variants(ops::family_of(desc))[config.variant].name == name;
  });
  return takes;
}

}  // namespace dyno::plan
