// Samples tokens. For one row, with candidates in descending order of logit (ties: lower id first):
//   top-k   keeps the first k
//   top-p   keeps the shortest prefix whose probability among the kept reaches p
//   min-p   keeps those with at least min_p times the probability of the best
//   then the temperature scales the logits, and sampling adds the probabilities of the kept tokens in the order of
//   their ids until the sum exceeds `uniform`.
// At least one candidate is kept. A NaN logit is never sampled; with `finite_only`, neither is any token of its row.
#include "ops/sample/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/sample/kernels_cuda.h"

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

// Whether `finite_only` samples from the row. Uses bits and no branch, so that compilers vectorise it, because it runs
// for every token.
bool is_finite(const float* logits, int64_t n) {
  constexpr uint32_t kInfinity = 0x7f800000, kSign = 0x80000000;
  uint32_t wrong = 0;
  uint32_t usable = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(logits[i]);
    wrong |= static_cast<uint32_t>((bits & ~kSign) > kInfinity) | static_cast<uint32_t>(bits == kInfinity);
    usable |= static_cast<uint32_t>(bits != (kInfinity | kSign));
  }
  return wrong == 0 && usable != 0;
}

int32_t greedy(const float* logits, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) best = i;
  }
  return static_cast<int32_t>(std::max<int64_t>(best, 0));
}

double probability(float logit, float best) { return std::exp(static_cast<double>(logit) - static_cast<double>(best)); }

// Sorts the candidates that pass the filters to the end of `all`, best last; returns their number.
int64_t filter(Candidate* all, int64_t n, const SampleSettings& settings) {
  std::make_heap(all, all + n, worse);
  const float best = all[0].logit;
  const bool by_mass = settings.top_p < 1.0f;
  int64_t most = settings.top_k > 0 ? std::min<int64_t>(settings.top_k, n) : n;
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
    while (prefix < kept && (prefix == 0 || mass < static_cast<double>(settings.top_p) * total)) {
      mass += probability(all[n - 1 - prefix].logit, best);
      ++prefix;
    }
    kept = prefix;
  } else {
    const double cutoff = settings.min_p > 0.0f ? static_cast<double>(settings.min_p) : -1.0;
    double mass = 0;
    while (kept < most && (!by_mass || kept == 0 || mass < static_cast<double>(settings.top_p) * total)) {
      const double p = probability(take(), best);
      mass += p;
      if (p < cutoff) break;
    }
  }
  if (settings.min_p > 0.0f) {
    while (kept > 1 && probability(all[n - kept].logit, best) < static_cast<double>(settings.min_p)) --kept;
  }
  return kept;
}

int32_t draw(const Candidate* kept, int64_t n, float best, const SampleSettings& settings, float uniform) {
  const double inverse = 1.0 / static_cast<double>(settings.temperature);
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

int32_t sample_row(const float* logits, int64_t n_vocab, const SampleSettings& settings, float uniform,
                   Candidate* scratch) {
  const int32_t top = greedy(logits, n_vocab);
  const float best = logits[top];
  if (settings.temperature <= 0.0f || !std::isfinite(best)) return top;
  int64_t n = 0;
  for (int64_t i = 0; i < n_vocab; ++i) {
    if (!std::isnan(logits[i])) scratch[n++] = {logits[i], static_cast<int32_t>(i)};
  }
  const bool filtered = (settings.top_k > 0 && settings.top_k < n) || settings.top_p < 1.0f || settings.min_p > 0.0f;
  if (!filtered) return draw(scratch, n, best, settings, uniform);
  const int64_t kept = filter(scratch, n, settings);
  Candidate* first = scratch + (n - kept);
  std::sort(first, first + kept, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return draw(first, kept, best, settings, uniform);
}

}  // namespace

Support supports(const SampleDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes = check_sizes({{"m", desc.m}, {"n_vocab", desc.n_vocab}});
  if (!sizes) return sizes;
  if (desc.n_vocab > std::numeric_limits<int32_t>::max()) {
    return Support::no(str_cat("n_vocab=", desc.n_vocab, " does not fit into 32-bit token ids"));
  }
  if (device.kind == DeviceKind::cuda && desc.m > kCudaMaxRows) {
    return Support::no(str_cat("m=", desc.m, " rows are more than the ", kCudaMaxRows, " of one launch"));
  }
  return check_config(Family::sample, kVariants, kInstances, config, device);
}

Config default_config(const SampleDesc& desc, const DeviceInfo& device) {
  if (device.kind != DeviceKind::cuda) return heap_params{.grain = 64};
  // A multiprocessor takes two blocks. More blocks than that wait, and each would only read a few chunks.
  constexpr int64_t kLeast = 8, kMost = 128;
  const int64_t places = int64_t{2} * std::max(device.sm_count, 1);
  int64_t blocks = kMost;
  while (blocks > kLeast && blocks * desc.m > places) blocks /= 2;
  return blocks_params{.blocks = static_cast<int16_t>(blocks)};
}

Cost cost(const SampleDesc& desc) {
  const double elements = static_cast<double>(desc.m) * static_cast<double>(desc.n_vocab);
  return {elements * sizeof(float), elements * 4};
}

size_t scratch_bytes(const SampleDesc& desc, const Config& config) {
  if (config.variant == k_blocks) return sample_blocks_scratch(desc, blocks_params::of(config).blocks, true);
  return static_cast<size_t>(desc.n_vocab) * sizeof(Candidate);
}

size_t unsorted_scratch_bytes(const SampleDesc& desc, const Config& config) {
  if (config.variant == k_blocks) return sample_blocks_scratch(desc, blocks_params::of(config).blocks, false);
  return scratch_bytes(desc, config);
}

void check_settings(const SampleSettings& settings) {
  DYNO_CHECK(PlanError, settings.temperature >= 0.0f && settings.temperature < std::numeric_limits<float>::infinity(),
             "[sample] temperature is ", settings.temperature, "; expected a number, 0 or more");
  DYNO_CHECK(PlanError, settings.top_k >= 0, "[sample] top_k ", settings.top_k, " is negative; 0 turns it off");
  DYNO_CHECK(PlanError, settings.top_p >= 0.0f && settings.top_p <= 1.0f, "[sample] top_p ", settings.top_p,
             " is not in [0, 1]");
  DYNO_CHECK(PlanError, settings.min_p >= 0.0f && settings.min_p <= 1.0f, "[sample] min_p ", settings.min_p,
             " is not in [0, 1]");
}

void launch(const Config& config, const SampleDesc& desc, const SampleArgs& args, CpuContext& context) {
  for (int64_t row = 0; row < desc.m; ++row) {
    if (row == 0 || args.row_settings != nullptr) check_settings(settings_of(args, row));
    DYNO_CHECK(PlanError, args.uniform[row] >= 0.0f && args.uniform[row] < 1.0f, "[sample] uniform ", args.uniform[row],
               " of row ", row, " is not in [0, 1)");
  }
  parallel_ranges(context, desc.m, desc.n_vocab, heap_params::of(config).grain * 1024,
                  [&](int64_t begin, int64_t end, std::byte* scratch) {
                    for (int64_t row = begin; row < end; ++row) {
                      const float* logits = args.logits + row * desc.n_vocab;
                      args.out[row] = args.finite_only && !is_finite(logits, desc.n_vocab)
                                          ? -1
                                          : sample_row(logits, desc.n_vocab, settings_of(args, row), args.uniform[row],
                                                       reinterpret_cast<Candidate*>(scratch));
                    }
                  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const SampleDesc& desc, const SampleArgs& args, CudaStream& stream) {
  if (args.row_settings == nullptr) check_settings(settings_of(args, 0));
  sample_blocks_cuda(args, desc, blocks_params::of(config).blocks, true, stream);
}
void launch_unsorted(const Config& config, const SampleDesc& desc, const SampleArgs& args, CudaStream& stream) {
  sample_blocks_cuda(args, desc, blocks_params::of(config).blocks, false, stream);
}
#endif

}  // namespace dyno::ops
