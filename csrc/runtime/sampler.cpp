#include "runtime/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "core/error.h"
#include "ops/sample/sample.h"

namespace dyno::runtime {
namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();

struct Candidate {
  float logit;
  int32_t id;
  double weight = 0;  // unnormalised probability
};

bool better(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

void check_number(const char* name, float value, float least, float most) {
  DYNO_CHECK(PlanError, value >= least && value <= most, "[sample] ", name, " is ", value, "; expected ", least, " to ",
             most);
}

// A logit after a finite change. If that overflows, the token is neither excluded nor infinitely probable, because two
// such tokens would have no distribution. An excluded token stays excluded.
float bounded(float before, float after) { return before > kExcluded ? std::clamp(after, -kMost, kMost) : before; }

double weigh(std::vector<Candidate>& kept) {
  double total = 0;
  for (Candidate& c : kept) {
    c.weight = std::exp(static_cast<double>(c.logit) - static_cast<double>(kept.front().logit));
    total += c.weight;
  }
  return total;
}

// Keeps the tokens whose surprise is nearest to the entropy, up to a total probability of `mass`.
void keep_typical(std::vector<Candidate>& kept, double mass) {
  const double total = weigh(kept);
  double entropy = 0;
  for (const Candidate& c : kept) {
    const double p = c.weight / total;
    if (p > 0) entropy -= p * std::log(p);
  }
  const auto distance = [&](const Candidate& c) {
    return c.weight > 0 ? std::abs(-std::log(c.weight / total) - entropy) : std::numeric_limits<double>::infinity();
  };
  std::vector<std::pair<double, size_t>> order(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) order[i] = {distance(kept[i]), i};
  std::sort(order.begin(), order.end());
  std::vector<Candidate> chosen;
  double reached = 0;
  for (const auto& [unused, i] : order) {
    chosen.push_back(kept[i]);
    reached += kept[i].weight / total;
    if (reached >= mass) break;
  }
  std::sort(chosen.begin(), chosen.end(), better);
  kept = std::move(chosen);
}

void keep_top_p(std::vector<Candidate>& kept, double mass) {
  const double total = weigh(kept);
  double reached = 0;
  size_t n = 0;
  while (n < kept.size() && (n == 0 || reached < mass * total)) reached += kept[n++].weight;
  kept.resize(n);
}

void keep_min_p(std::vector<Candidate>& kept, double least) {
  weigh(kept);
  while (kept.size() > 1 && kept.back().weight < least) kept.pop_back();
}

// Drops the tokens that reach the threshold, except the least probable of them.
void exclude_top(std::vector<Candidate>& kept, double threshold) {
  const double total = weigh(kept);
  size_t n = 0;
  while (n < kept.size() && kept[n].weight >= threshold * total) ++n;
  if (n >= 2) kept.erase(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(n - 1));
}

}  // namespace

Sampler::Sampler(SamplerSettings settings, int64_t n_vocab) : settings_(std::move(settings)), n_vocab_(n_vocab) {
  DYNO_CHECK(PlanError, n_vocab > 0, "[sample] a vocabulary of ", n_vocab, " tokens; expected 1 or more");
  ops::check_settings(settings_.base);
  check_number("typical_p", settings_.typical_p, 0, 1);
  check_number("xtc_probability", settings_.xtc_probability, 0, 1);
  check_number("xtc_threshold", settings_.xtc_threshold, 0, 1);
  check_number("presence_penalty", settings_.presence_penalty, -kMost, kMost);
  check_number("frequency_penalty", settings_.frequency_penalty, -kMost, kMost);
  check_number("dry_multiplier", settings_.dry_multiplier, 0, kMost);
  check_number("dry_base", settings_.dry_base, 1, kMost);
  DYNO_CHECK(PlanError, settings_.repeat_penalty > 0 && settings_.repeat_penalty <= kMost,
             "[sample] repeat_penalty is ", settings_.repeat_penalty, "; expected a number above 0");
  DYNO_CHECK(PlanError, settings_.repeat_last_n >= -1, "[sample] repeat_last_n is ", settings_.repeat_last_n,
             "; expected -1 (all) or a number of tokens");
  DYNO_CHECK(PlanError, settings_.dry_allowed_length >= 0, "[sample] dry_allowed_length is ",
             settings_.dry_allowed_length, "; expected a number of tokens");
  breaks_.assign(static_cast<size_t>(n_vocab), false);
  const auto check_token = [&](const char* name, int32_t token) {
    DYNO_CHECK(PlanError, token >= 0 && token < n_vocab, "[sample] ", name, " names token ", token,
               "; the vocabulary has ", n_vocab);
  };
  for (const int32_t token : settings_.dry_breakers) {
    check_token("dry_breakers", token);
    breaks_[static_cast<size_t>(token)] = true;
  }
  for (const auto& [token, value] : settings_.bias) {
    check_token("logit_bias", token);
    DYNO_CHECK(PlanError, !std::isnan(value) && value <= kMost, "[sample] the logit_bias of token ", token, " is ",
               value, "; expected a finite number or -inf");
  }
}

void Sampler::begin(std::span<const int32_t> prompt) {
  for (const int32_t token : prompt) {
    DYNO_CHECK(PlanError, token >= 0 && token < n_vocab_, "[sample] the prompt has token ", token,
               "; the vocabulary has ", n_vocab_);
  }
  tokens_.assign(prompt.begin(), prompt.end());
  prompt_ = prompt.size();
}

void Sampler::penalize() {
  if (settings_.repeat_penalty != 1.0f) {
    const auto last = settings_.repeat_last_n < 0 ? tokens_.size() : static_cast<size_t>(settings_.repeat_last_n);
    std::vector<int32_t> recent(tokens_.end() - static_cast<std::ptrdiff_t>(std::min(last, tokens_.size())),
                                tokens_.end());
    std::sort(recent.begin(), recent.end());
    recent.erase(std::unique(recent.begin(), recent.end()), recent.end());
    for (const int32_t token : recent) {
      float& logit = logits_[static_cast<size_t>(token)];
      logit = bounded(logit, logit > 0 ? logit / settings_.repeat_penalty : logit * settings_.repeat_penalty);
    }
  }
  if (settings_.presence_penalty != 0.0f || settings_.frequency_penalty != 0.0f) {
    std::unordered_map<int32_t, int64_t> counts;
    for (size_t i = prompt_; i < tokens_.size(); ++i) ++counts[tokens_[i]];
    for (const auto& [token, count] : counts) {
      float& logit = logits_[static_cast<size_t>(token)];
      const float penalty = settings_.presence_penalty + settings_.frequency_penalty * static_cast<float>(count);
      logit = bounded(logit, logit - penalty);
    }
  }
}

// For each earlier position, compares the tokens before it with the tokens at the end of the text. The number of
// matching tokens, without a breaker among them, is the length of the repeated sequence that the token at that position
// would continue.
void Sampler::dry() {
  if (settings_.dry_multiplier == 0.0f) return;
  const auto last = settings_.repeat_last_n < 0 ? tokens_.size() : static_cast<size_t>(settings_.repeat_last_n);
  const std::vector<int32_t> reversed(tokens_.rbegin(),
                                      tokens_.rbegin() + static_cast<std::ptrdiff_t>(std::min(last, tokens_.size())));
  const size_t n = reversed.size();
  size_t limit = 0;
  while (limit < n && !breaks_[static_cast<size_t>(reversed[limit])]) ++limit;
  // agree[k]: length of the common prefix of `reversed` and its suffix from k on; computed in linear time.
  std::vector<size_t> agree(n, 0);
  std::unordered_map<int32_t, size_t> longest;  // by the token that would continue it
  for (size_t k = 1, begin = 0, end = 0; k < n; ++k) {
    size_t length = k < end ? std::min(end - k, agree[k - begin]) : 0;
    while (k + length < n && reversed[length] == reversed[k + length]) ++length;
    if (k + length > end) begin = k, end = k + length;
    agree[k] = length;
    size_t& most = longest[reversed[k - 1]];
    most = std::max(most, std::min(length, limit));
  }
  for (const auto& [token, length] : longest) {
    const auto over = static_cast<int64_t>(length) - settings_.dry_allowed_length;
    if (length == 0 || over < 0) continue;
    const double penalty = static_cast<double>(settings_.dry_multiplier) *
                           std::pow(static_cast<double>(settings_.dry_base), static_cast<double>(over));
    float& logit = logits_[static_cast<size_t>(token)];
    logit = bounded(logit, logit - static_cast<float>(std::min(penalty, static_cast<double>(kMost))));
  }
}

int32_t Sampler::filtered(float uniform, float xtc_uniform) {
  std::vector<Candidate> kept;
  for (size_t i = 0; i < logits_.size(); ++i) {
    if (logits_[i] > kExcluded) kept.push_back({logits_[i], static_cast<int32_t>(i)});  // false for NaN, too
  }
  const auto top_k = static_cast<size_t>(settings_.base.top_k);
  if (top_k > 0 && top_k < kept.size()) {
    std::nth_element(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(top_k), kept.end(), better);
    kept.resize(top_k);
  }
  std::sort(kept.begin(), kept.end(), better);
  if (settings_.typical_p < 1.0f) keep_typical(kept, static_cast<double>(settings_.typical_p));
  if (settings_.base.top_p < 1.0f) keep_top_p(kept, static_cast<double>(settings_.base.top_p));
  if (settings_.base.min_p > 0.0f) keep_min_p(kept, static_cast<double>(settings_.base.min_p));
  if (xtc_uniform < settings_.xtc_probability) exclude_top(kept, static_cast<double>(settings_.xtc_threshold));
  const float best = kept.front().logit;
  double total = 0;
  for (Candidate& c : kept) {
    const double distance = static_cast<double>(c.logit) - static_cast<double>(best);
    c.weight = std::exp(distance / static_cast<double>(settings_.base.temperature));
    total += c.weight;
  }
  std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  const double target = static_cast<double>(uniform) * total;
  double cumulative = 0;
  int32_t chosen = kept.front().id;
  for (const Candidate& c : kept) {
    if (c.weight <= 0) continue;
    cumulative += c.weight;
    chosen = c.id;
    if (cumulative > target) break;
  }
  return chosen;
}

int32_t Sampler::draw(std::span<const float> logits, float uniform, float xtc_uniform, std::span<const uint32_t> mask) {
  DYNO_CHECK(PlanError, static_cast<int64_t>(logits.size()) == n_vocab_, "[sample] ", logits.size(),
             " logits for a vocabulary of ", n_vocab_);
  DYNO_CHECK(PlanError, uniform >= 0.0f && uniform < 1.0f, "[sample] uniform ", uniform, " is not in [0, 1)");
  DYNO_CHECK(PlanError, xtc_uniform >= 0.0f && xtc_uniform < 1.0f, "[sample] xtc_uniform ", xtc_uniform,
             " is not in [0, 1)");
  logits_.assign(logits.begin(), logits.end());
  for (const auto& [token, value] : settings_.bias) {
    float& logit = logits_[static_cast<size_t>(token)];
    logit = value > kExcluded ? bounded(logit, logit + value) : kExcluded;
  }
  penalize();
  dry();
  if (!mask.empty()) {
    for (size_t i = 0; i < logits_.size(); ++i) {
      const size_t word = i / 32;
      if (word >= mask.size() || (mask[word] >> (i % 32) & 1u) == 0) logits_[i] = kExcluded;
    }
  }
  DYNO_CHECK(PlanError, std::any_of(logits_.begin(), logits_.end(), [](float x) { return x > kExcluded; }),
             "[sample] logit_bias and the grammar exclude every token; relax one of them");
  int32_t token = 0;
  if (settings_.base.temperature > 0.0f && (settings_.typical_p < 1.0f || settings_.xtc_probability > 0.0f)) {
    token = filtered(uniform, xtc_uniform);
  } else {
    const ops::SampleDesc desc{.m = 1, .n_vocab = n_vocab_};
    const ops::Config config = ops::default_config(desc, DeviceInfo{});
    std::vector<std::byte> scratch(ops::scratch_bytes(desc, config));
    ops::CpuContext context{.scratch = scratch.data(), .scratch_per_thread = scratch.size()};
    const ops::SampleSettings& base = settings_.base;
    ops::launch(config, desc,
                ops::SampleArgs{.logits = logits_.data(),
                                .uniform = &uniform,
                                .temperature = base.temperature,
                                .top_k = base.top_k,
                                .top_p = base.top_p,
                                .min_p = base.min_p,
                                .out = &token},
                context);
  }
  tokens_.push_back(token);
  return token;
}

std::vector<TokenLogprob> logprobs(std::span<const float> logits, int32_t token, int64_t top) {
  const auto n = static_cast<int64_t>(logits.size());
  DYNO_CHECK(PlanError, token >= 0 && token < n, "[sample] the token is ", token, "; the vocabulary has ", n);
  DYNO_CHECK(PlanError, top >= 0, "[sample] the number of most probable tokens is ", top, "; expected 0 or more");
  const double best = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
  double total = 0;
  for (const float x : logits) total += std::exp(static_cast<double>(x) - best);
  const double norm = best + std::log(total);
  const auto entry = [&](int32_t id) {
    return TokenLogprob{id, static_cast<float>(static_cast<double>(logits[static_cast<size_t>(id)]) - norm)};
  };
  std::vector<int32_t> order(static_cast<size_t>(n));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  const auto count = static_cast<std::ptrdiff_t>(std::min(top, n));
  std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x > y || (x == y && a < b);
  });
  std::vector<TokenLogprob> found{entry(token)};
  for (std::ptrdiff_t i = 0; i < count; ++i) found.push_back(entry(order[static_cast<size_t>(i)]));
  return found;
}

}  // namespace dyno::runtime
