#include "ops/index_select/index_select.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>

#include "core/error.h"
#include "ops/contract.h"
#include "ops/index_select/kernels.h"
#include "ops/index_select/kernels_cuda.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/runs.h"

namespace dyno::ops {

#define DYNO_FAMILY index_select
#define DYNO_FAMILY_DESC IndexSelectDesc
#define DYNO_FAMILY_VARIANTS "ops/index_select/variants.def"
#include "ops/family_table.inc"

namespace {

constexpr int64_t kPartTokens = 64;  // maximum of variant parts, which waits for all threads after each token
constexpr int64_t kPartKeys = 256;   // keys of a block in variant parts
constexpr int64_t kMostSelected = int64_t{1} << 24;
constexpr int64_t kThreadWork = int64_t{1} << 16;  // minimum multiply-adds for which waking a thread pays off

// A position with its score as one number: of two, the better position is the larger number. Scores become unsigned
// numbers of the same order; -0 becomes 0 first, because both are equal.
uint64_t ranked(float score, int64_t position) {
  const uint32_t bits = score != score ? 0xffffffffu : std::bit_cast<uint32_t>(score + 0.0f);
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{order} << 32 | (0xffffffffu - static_cast<uint32_t>(position));
}
int32_t position_of(uint64_t rank) { return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(rank)); }

// The best `most` of a stream of ranks. It is cut whenever twice as many are held, so a rank costs constant time.
class Best {
 public:
  static int64_t capacity(int64_t most, int64_t block) { return 2 * most + block; }

  Best(uint64_t* held, int64_t most) : held_(held), most_(most) {}

  void add(const float* scores, int64_t count, int64_t first) {
    for (int64_t i = 0; i < count; ++i) {
      const uint64_t rank = ranked(scores[i], first + i);
      if (rank > least_) held_[count_++] = rank;
    }
    if (count_ > 2 * most_) cut();
  }
  // Reduces the held ranks to the best ones and returns their number.
  int64_t finish() {
    if (count_ > most_) cut();
    return count_;
  }

 private:
  void cut() {
    std::nth_element(held_, held_ + most_ - 1, held_ + count_, std::greater<>());
    count_ = most_;
    least_ = held_[most_ - 1];
  }

  uint64_t* held_;
  int64_t most_;
  int64_t count_ = 0;
  uint64_t least_ = 0;  // ranks up to it are not among the best
};

// A thread's scratch: ranks, then queries, then scores. Variant parts has the lists of all parts in front of that.
struct ScratchPlan {
  size_t list, lists, queries, scores;
  ScratchPlan(const IndexSelectDesc& d, int64_t block, int64_t parts)
      : list(static_cast<size_t>(Best::capacity(d.selected, block)) * sizeof(uint64_t)),
        lists((list * static_cast<size_t>(parts) + 63) / 64 * 64),
        queries((static_cast<size_t>(index_query_floats(d.heads, d.dk)) * sizeof(float) + 63) / 64 * 64),
        scores((static_cast<size_t>(block) * sizeof(float) + 63) / 64 * 64) {}
  size_t bytes() const { return lists + queries + scores; }
};

int64_t block_of(const Config& config) {
  return config.variant == k_tokens ? tokens_params::of(config).keys : kPartKeys;
}
int64_t parts_of(const Config& config) { return config.variant == k_parts ? parts_params::of(config).splits : 1; }

ScratchPlan layout_of(const IndexSelectDesc& desc, const Config& config) {
  return {desc, block_of(config), parts_of(config)};
}

struct Token {
  const float* q;
  const float* weights;
  const std::byte* keys;  // of its sequence
  int64_t key_row_bytes;
  int64_t seen;  // positions
  int32_t* out;
};

// The number of the best positions in [begin, end), whose ranks are left in `held`.
int64_t best_of(const IndexSelectDesc& desc, const Token& token, int64_t begin, int64_t end, int64_t block, CpuIsa isa,
                uint64_t* held, float* queries, float* scores) {
  DYNO_DISPATCH_ISA(isa, index_queries(token.q, token.weights, desc.heads, desc.dk, queries));
  Best best(held, desc.selected);
  for (int64_t first = begin; first < end; first += block) {
    const int64_t count = std::min(block, end - first);
    DYNO_DISPATCH_ISA(isa, index_scores(queries, desc.heads, desc.dk, token.keys + first * token.key_row_bytes,
                                        token.key_row_bytes, count, scores));
    best.add(scores, count, first);
  }
  return best.finish();
}

void write(const uint64_t* held, int64_t count, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = position_of(held[i]);
  std::sort(out, out + count);
}

void take_all(const IndexSelectDesc& desc, const Token& token) {
  for (int64_t i = 0; i < desc.selected; ++i) token.out[i] = i < token.seen ? static_cast<int32_t>(i) : -1;
}

Token token_of(const IndexSelectArgs& args, const SequenceRun& run, int64_t i) {
  const int64_t row = run.first_token + i;
  return {args.q + row * args.q_stride,
          args.weights + row * args.weights_stride,
          args.keys + run.slot * args.slot_positions * args.key_row_bytes,
          args.key_row_bytes,
          run.position + i + 1,
          args.out + row * args.out_stride};
}

void select_in_parts(const IndexSelectDesc& desc, const Token& token, int64_t parts, const ScratchPlan& layout,
                     CpuContext& context) {
  // The lists are at the start of the scratch of all threads; the rest of each share is the thread's own.
  const auto list_of = [&](int64_t part) {
    return reinterpret_cast<uint64_t*>(context.scratch + static_cast<size_t>(part) * layout.list);
  };
  const auto first = [&](int64_t part) { return token.seen * part / parts; };
  std::array<int64_t, 64> counts{};
  parallel_items(context, parts, token.seen * desc.heads * desc.dk, kThreadWork, [&](int64_t part, std::byte* scratch) {
    auto* queries = reinterpret_cast<float*>(scratch + layout.lists);
    auto* scores = reinterpret_cast<float*>(scratch + layout.lists + layout.queries);
    counts[static_cast<size_t>(part)] =
        best_of(desc, token, first(part), first(part + 1), kPartKeys, context.isa, list_of(part), queries, scores);
  });
  uint64_t* all = list_of(0);
  int64_t count = counts[0];
  for (int64_t part = 1; part < parts; ++part) {
    const int64_t more = counts[static_cast<size_t>(part)];
    std::copy_n(list_of(part), more, all + count);  // the target is never behind the source
    count += more;
  }
  std::nth_element(all, all + desc.selected - 1, all + count, std::greater<>());
  write(all, desc.selected, token.out);
}

}  // namespace

Support supports(const IndexSelectDesc& desc, const Config& config, const DeviceInfo& device) {
  const Support sizes =
      check_sizes({{"m", desc.m}, {"heads", desc.heads}, {"dk", desc.dk}, {"selected", desc.selected}});
  if (!sizes) return sizes;
  if (desc.selected > kMostSelected) {
    return Support::no(str_cat("selected=", desc.selected, " is more than ", kMostSelected));
  }
  const Support checked = check_config(Family::index_select, kVariants, kInstances, config, device);
  if (checked && config.variant == k_parts && desc.m > kPartTokens) {
    return Support::no(str_cat("variant parts is for up to ", kPartTokens, " tokens, not m=", desc.m));
  }
  if (checked && config.variant == k_blocks) {
    const int64_t splits = blocks_params::of(config).splits, most = index_most_lists(desc);
    if (splits > 1 && desc.m * splits > most) {
      return Support::no(str_cat("splits=", splits, " of m=", desc.m, " tokens make more than the ", most,
                                 " lists of selected=", desc.selected, " positions that a launch holds"));
    }
  }
  return checked;
}

Config default_config(const IndexSelectDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    // As many parts as give every multiprocessor two blocks.
    Config best = blocks_params{.splits = 1};
    for (const Config& config : kInstances) {
      if (config.variant != k_blocks || !supports(desc, config, device)) continue;
      if (desc.m * blocks_params::of(config).splits <= 2 * device.sm_count) best = config;
    }
    return best;
  }
  if (desc.m >= device.cores || desc.m > kPartTokens) return tokens_params{.keys = 256};
  return parts_params{.splits = static_cast<int16_t>(device.cores <= 4 ? 4 : device.cores <= 8 ? 8 : 16)};
}

// Assumes a cache with only this batch, because a Desc does not have the depth.
Cost cost(const IndexSelectDesc& desc) {
  const double m = static_cast<double>(desc.m), width = static_cast<double>(desc.heads * desc.dk);
  return {m * (width + static_cast<double>(desc.heads + desc.dk + desc.selected)) * 4, m * (m + 1) / 2 * width * 2};
}

size_t scratch_bytes(const IndexSelectDesc& desc, const Config& config) {
  if (config.variant == k_blocks) return index_scratch_bytes(desc, blocks_params::of(config).splits);
  return layout_of(desc, config).bytes();
}

void launch(const Config& config, const IndexSelectDesc& desc, const IndexSelectArgs& args, CpuContext& context) {
  check_runs("index_select", args.runs, args.n_runs, desc.m, args.slot_positions);
  const ScratchPlan layout = layout_of(desc, config);
  const int64_t parts = parts_of(config), block = block_of(config);
  int64_t tokens = 0, pairs = 0;
  for (int32_t r = 0; r < args.n_runs; ++r) {
    const SequenceRun& run = args.runs[r];
    tokens += run.n_tokens;
    const int64_t end = int64_t{run.position} + run.n_tokens;
    if (end > desc.selected) pairs += run.n_tokens * end;
    for (int64_t i = 0; config.variant == k_parts && i < run.n_tokens; ++i) {
      const Token token = token_of(args, run, i);
      if (token.seen <= desc.selected) {
        take_all(desc, token);
      } else {
        select_in_parts(desc, token, parts, layout, context);
      }
    }
  }
  if (config.variant == k_parts) return;
  parallel_items(context, tokens, pairs * desc.heads * desc.dk, kThreadWork, [&](int64_t item, std::byte* scratch) {
    const SequenceRun* run = args.runs;
    for (; item >= run->n_tokens; ++run) item -= run->n_tokens;
    const Token token = token_of(args, *run, item);
    if (token.seen <= desc.selected) return take_all(desc, token);
    auto* held = reinterpret_cast<uint64_t*>(scratch);
    const int64_t count =
        best_of(desc, token, 0, token.seen, block, context.isa, held, reinterpret_cast<float*>(scratch + layout.lists),
                reinterpret_cast<float*>(scratch + layout.lists + layout.queries));
    write(held, count, token.out);
  });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const IndexSelectDesc& desc, const IndexSelectArgs& args, CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::latent)) {
    throw_left_out(KernelGroup::latent);
  } else {
    index_select_cuda(args, desc, blocks_params::of(config).splits, stream);
  }
}
#endif

}  // namespace dyno::ops
