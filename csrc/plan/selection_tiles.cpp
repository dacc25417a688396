// Rows that one op writes for the next as f16 tiles (ops/half_tiles.h), if the configurations of both support it, and
// the reasons of rows that stay float32.
#include <algorithm>

#include "core/error.h"
#include "ops/attention/attention.h"
#include "ops/half_tiles.h"
#include "plan/selection.h"

namespace dyno::plan {
namespace {

int nodes_of(const NodeList& list, int32_t passing) {
  return static_cast<int>(
      std::count_if(list.nodes.begin(), list.nodes.end(), [&](const Node& node) { return node.gives == passing; }));
}

}  // namespace

// Attention's tiles hold rows of one token each, so the tokens must belong to different sequences.
bool Selection::one_token_each(const Passing& passing) const {
  return ops::family_of(use(passing.from).desc) == ops::Family::attention;
}

Selection::Ends Selection::ends(const Passing& passing, int64_t tokens) const {
  const Launch giver = launch(passing.from, tokens, tokens), reader = launch(passing.to, tokens, tokens);
  return {giver.desc, reader.desc, giver.config, reader.config};
}

Selection::Ends Selection::default_ends(const Passing& passing, int64_t tokens) const {
  Ends ends = this->ends(passing, tokens);
  const auto config = [&](int32_t key) {
    const ops::OpDesc desc = band_desc(key, path_of(key, tokens), band_of_op(key, tokens));
    return ops::default_config(desc, plan_->device(use(key).device));
  };
  ends.gives = config(passing.from);
  ends.reads = config(passing.to);
  return ends;
}

Selection::Handover Selection::handover(const Passing& passing, Ends ends, int64_t tokens) const {
  const auto end = [&](int32_t key, const ops::Config& config) {
    return str_cat(use(key).key, " with ", ops::describe(ops::family_of(use(key).desc), config));
  };
  const auto rows = [&](bool reads, auto... why) { return Handover{.reads = reads, .why = str_cat(why...)}; };
  const int64_t height = ops::tile_height(ends.reader, ends.reads);
  if (height == 0 || !ops::set_tiles(ends.giver, ends.reader, height)) {
    return rows(false, end(passing.to, ends.reads), " reads no f16 tiles");
  }
  const ops::Support reads = ops::supports(ends.reader, ends.reads, plan_->device(use(passing.to).device));
  if (!reads) return rows(false, end(passing.to, ends.reads), ": ", reads.reason);
  const ops::Support gives = ops::supports(ends.giver, ends.gives, plan_->device(use(passing.from).device));
  if (!gives) {
    const int64_t own = ops::tile_height(ends.giver, ends.gives);
    const bool differ = own != 0 && own != height;
    return rows(true, end(passing.from, ends.gives), ": ", gives.reason,
                differ ? str_cat(", for ", end(passing.to, ends.reads)) : "");
  }
  // The tiles replace the rows in their memory.
  const auto bytes =
      static_cast<size_t>(ops::half_tiles(tokens, std::get<ops::MatmulDesc>(ends.reader).k, height).bytes());
  const size_t room = value_bytes(*plan_, plan_->values[static_cast<size_t>(passing.value)]);
  if (bytes > room) {
    return rows(true, "tiles of ", height, " rows take ", bytes, " bytes, and the rows of a u-batch of ", plan_->ubatch,
                " tokens have ", room);
  }
  return {.height = height, .reads = true};
}

int64_t Selection::tiles_between(int32_t passing, int64_t tokens, int64_t runs, int64_t depth) const {
  if (passing < 0) return 0;
  const Passing& rows = plan_->passings[static_cast<size_t>(passing)];
  if (one_token_each(rows)) {
    if (runs != tokens) return 0;
    const Launch giver = launch(rows.from, tokens, tokens);
    const auto& attention = std::get<ops::AttentionDesc>(giver.desc);
    if (!ops::steps_in_one_part(attention, giver.config, depth, plan_->device(use(rows.from).device))) return 0;
  }
  // Every launch asks, so the answer for these tokens is cached.
  std::atomic<int16_t>& known = heights_[static_cast<size_t>(passing)].at(static_cast<size_t>(tokens));
  if (const int16_t seen = known.load(std::memory_order_relaxed); seen != kUnknown) return seen;
  const int64_t height = handover(rows, ends(rows, tokens), tokens).height;
  known.store(static_cast<int16_t>(height), std::memory_order_relaxed);
  return height;
}

int64_t Selection::tiles_of(int32_t key, int64_t tokens, int64_t runs) const {
  int64_t height = 0;
  for (const Node& node : plan_->list_for(tokens).nodes) {
    if (node.key != key) continue;
    height = std::max({height, tiles_between(node.gives, tokens, runs, 0), tiles_between(node.gets, tokens, runs, 0)});
  }
  return height;
}

std::string Selection::condition(const Passing& passing) const {
  return one_token_each(passing) ? ", if each token is of another sequence and the contexts are not deep" : "";
}

std::string Selection::passes_text(int32_t key, int64_t tokens) const {
  const NodeList& list = plan_->list_for(tokens);
  std::string text;
  for (size_t i = 0; i < plan_->passings.size(); ++i) {
    const Passing& passing = plan_->passings[i];
    const auto index = static_cast<int32_t>(i);
    const int nodes = passing.from == key || passing.to == key ? nodes_of(list, index) : 0;
    if (nodes == 0) continue;
    const std::string share = str_cat("; ", nodes, " of ", use(key).count_in(list.id));
    const std::string beside =
        str_cat(passing.from == key ? " to the op that reads them" : " from the op that writes them");
    if (tiles_between(index, tokens, tokens, 0) > 0) {
      text += str_cat(share, " as f16 tiles", beside, ", without a launch between them", condition(passing));
      continue;
    }
    // Few products read tiles at all. Nothing is reported for the others.
    const Handover chosen = handover(passing, ends(passing, tokens), tokens);
    if (chosen.reads || handover(passing, default_ends(passing, tokens), tokens).reads) {
      text += str_cat(share, " as float32 rows", beside, ", not as f16 tiles: ", chosen.why);
    }
  }
  return text;
}

std::string Selection::ended_passes(const profile::KernelEntry& entry) const {
  std::string text;
  std::vector<std::pair<int32_t, int32_t>> told;
  for (int bucket = entry.first_bucket; bucket <= std::min(entry.last_bucket, kBuckets - 1); ++bucket) {
    const auto [low, high] = ops::bucket_range(bucket);
    if (low > plan_->ubatch) break;
    const int64_t tokens = std::min(high, plan_->ubatch);
    const NodeList& list = plan_->list_for(tokens);
    for (size_t i = 0; i < plan_->passings.size(); ++i) {
      const Passing& passing = plan_->passings[i];
      const std::pair<int32_t, int32_t> keys = {passing.from, passing.to};
      const bool own = use(passing.from).key == entry.op_key || use(passing.to).key == entry.op_key;
      if (!own || nodes_of(list, static_cast<int32_t>(i)) == 0) continue;
      if (std::find(told.begin(), told.end(), keys) != told.end()) continue;
      const Handover chosen = handover(passing, ends(passing, tokens), tokens);
      if (chosen.height > 0 || handover(passing, default_ends(passing, tokens), tokens).height == 0) continue;
      told.push_back(keys);
      text += str_cat("; with ", ops::bucket_name(bucket), " rows from ", use(passing.from).key, " to ",
                      use(passing.to).key, " stay float32: ", chosen.why, "; the defaults pass on f16 tiles",
                      condition(passing));
    }
  }
  return text;
}

}  // namespace dyno::plan
