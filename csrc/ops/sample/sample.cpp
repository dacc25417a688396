// Draws tokens. For one row, with candidates in descending order of logit (ties: lower id first):
//   top-k   keeps the first k
//   top-p   keeps the shortest prefix whose probability among the kept reaches p
//   min-p   keeps those with at least min_p times the probability of the best
//   then probabilities are sharpened or flattened by the temperature, and the draw walks the kept tokens in the order
//   of their ids until the cumulative probability exceeds `uniform`.
// At least one candidate stays. A NaN logit is never drawn.
#include "ops/sample/sample.h"

#include <cmath>
#include <limits>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/parallel.h"
#include "ops/registry.h"

namespace dyno::ops {

#define DYNO_FAMILY sample
#define DYNO_FAMILY_DESC SampleDesc
#define DYNO_FAMILY_VARIANTS "ops/sample/variants.def"
#include "ops/family_table.inc"

namespace {

struct Candidate {
  float logit;
  int32_t id;
};

bool worse(const Candidate& a, const Candidate& b) { return a.logit < b.logit || (a.logit == b.logit && a.id > b.id); }

int32_t greedy(const float* logits, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) best = i;
  }
  return static_cast<int32_t>(std::max<int64_t>(best, 0));
}

double probability(float logit, float best) { return std::exp(static_cast<double>(logit) - static_cast<double>(best)); }

// Sorts the candidates that pass the filters to the back of `all`, the best one last; returns how many they are.
int64_t filter(Candidate* all, int64_t n, const SampleArgs& args) {
  std::make_heap(all, all + n, worse);
  const float best = all[0].logit;
  const bool by_mass = args.top_p < 1.0f;
  int64_t most = args.top_k > 0 ? std::min<int64_t>(args.top_k, n) : n;
  double total = 0;
  if (by_mass && most == n) {
    for (int64_t i = 0; i < n; ++i) total += probability(all[i].logit, best);
  }
  int64_t kept = 0;
  const auto take = [&] {
    std::pop_heap(all, all + (n - kept), worse);
    ++kept;
    return all[n - kept].logit;
  };
  if (by_mass && most < n) {
    while (kept < most) total += probability(take(), best);
    double mass = 0;
    int64_t prefix = 0;
    while (prefix < kept && (prefix == 0 || mass < static_cast<double>(args.top_p) * total)) {
      mass += probability(all[n - 1 - prefix].logit, best);
      ++prefix;
    }
    kept = prefix;
  } else {
    const double cutoff = args.min_p > 0.0f ? static_cast<double>(args.min_p) : -1.0;
    double mass = 0;
    while (kept < most && (!by_mass || kept == 0 || mass < static_cast<double>(args.top_p) * total)) {
      const double p = probability(take(), best);
      mass += p;
      if (p < cutoff) break;
    }
  }
  if (args.min_p > 0.0f) {
    while (kept > 1 && probability(all[n - kept].logit, best) < static_cast<double>(args.min_p)) --kept;
  }
  return kept;
}

int32_t draw(const Candidate* kept, int64_t n, float best, const SampleArgs& args, float uniform) {
  const double inverse = 1.0 / static_cast<double>(args.temperature);
  const auto weight = [&](const Candidate& c) {
    const double distance = static_cast<double>(c.logit) - static_cast<double>(best);
    return distance == 0.0 ? 1.0 : std::exp(distance * inverse);
  };
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += weight(kept[i]);
  const double target = static_cast<double>(uniform) * total;
  double cumulative = 0;
  int32_t last = kept[0].id;
  for (int64_t i = 0; i < n; ++i) {
    const double w = weight(kept[i]);
    if (w <= 0) continue;
    cumulative += w;
    last = kept[i].id;
    if (cumulative > target) break;
  }
  return last;
}

int32_t sample_row(const float* logits, int64_t n_vocab, const SampleArgs& args, float uniform, Candidate* scratch) {
  const int32_t top = greedy(logits, n_vocab);
  const float best = logits[top];
  if (args.temperature <= 0.0f || !std::isfinite(best)) return top;
  int64_t n = 0;
  for (int64_t i = 0; i < n_vocab; ++i) {
    if (!std::isnan(logits[i])) scratch[n++] = {logits[i], static_cast<int32_t>(i)};
  }
  const bool filtered = (args.top_k > 0 && args.top_k < n) || args.top_p < 1.0f || args.min_p > 0.0f;
  if (!filtered) return draw(scratch, n, best, args, uniform);
  const int64_t kept = filter(scratch, n, args);
  Candidate* first = scratch + (n - kept);
  std::sort(first, first + kept, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return draw(first, kept, best, args, uniform);
}

}  // namespace

Support supports(const SampleDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"n_vocab", desc.n_vocab}});
  if (!sizes) return sizes;
  if (desc.n_vocab > std::numeric_limits<int32_t>::max()) {
    return Support::no(str_cat("n_vocab=", desc.n_vocab, " does not fit into 32-bit token ids"));
  }
  return check_config(Family::sample, kVariants, kInstances, config, device);
}

Config default_config(const SampleDesc&, const DeviceInfo&) { return {k_heap, {64}}; }

Cost cost(const SampleDesc& desc) {
  const double elements = static_cast<double>(desc.m) * static_cast<double>(desc.n_vocab);
  return {elements * (4 + 2 * sizeof(Candidate)), elements * 4};
}

size_t scratch_bytes(const SampleDesc& desc, const Config&) {
  return static_cast<size_t>(desc.n_vocab) * sizeof(Candidate);
}

void launch(const Config& config, const SampleDesc& desc, const SampleArgs& args, CpuContext& context) {
  DYNO_CHECK(PlanError, args.temperature >= 0.0f && args.temperature < std::numeric_limits<float>::infinity(),
             "[sample] temperature ", args.temperature, " is not a number from 0 on");
  DYNO_CHECK(PlanError, args.top_k >= 0, "[sample] top_k ", args.top_k, " is negative; 0 turns it off");
  DYNO_CHECK(PlanError, args.top_p >= 0.0f && args.top_p <= 1.0f, "[sample] top_p ", args.top_p, " is not in [0, 1]");
  DYNO_CHECK(PlanError, args.min_p >= 0.0f && args.min_p <= 1.0f, "[sample] min_p ", args.min_p, " is not in [0, 1]");
  for (int64_t row = 0; row < desc.m; ++row) {
    DYNO_CHECK(PlanError, args.uniform[row] >= 0.0f && args.uniform[row] < 1.0f, "[sample] uniform ", args.uniform[row],
               " of row ", row, " is not in [0, 1)");
  }
  parallel_ranges(context, desc.m, desc.n_vocab, config.params[0] * 1024,
                  [&](int64_t begin, int64_t end, std::byte* scratch) {
                    for (int64_t row = begin; row < end; ++row) {
                      args.out[row] = sample_row(args.logits + row * desc.n_vocab, desc.n_vocab, args,
                                                 args.uniform[row], reinterpret_cast<Candidate*>(scratch));
                    }
                  });
}

}  // namespace dyno::ops
