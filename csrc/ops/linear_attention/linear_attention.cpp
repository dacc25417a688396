#include "ops/linear_attention/linear_attention.h"

#include <algorithm>

#include "ops/contract.h"
#include "ops/linear_attention/prepare.h"
#include "ops/parallel.h"
#include "ops/registry.h"
#include "ops/runs.h"

namespace dyno::ops {

#define DYNO_FAMILY linear_attention
#define DYNO_FAMILY_DESC LinearAttentionDesc
#define DYNO_FAMILY_VARIANTS "ops/linear_attention/variants.def"
#include "ops/family_table.inc"

namespace {

constexpr int64_t kTokens = 16;  // tokens that `recurrent` prepares at once
// The matrix products of a chunk do not pay off for a run, or its end, with fewer tokens.
constexpr int64_t kLeastChunk = 8;
constexpr int64_t kGrain = 16384;  // state elements times tokens for which a thread pays off

}  // namespace

Support supports(const LinearAttentionDesc& d, const Config& config, const DeviceInfo& device) {
  const Support sizes =
      check_sizes({{"m", d.m}, {"k_heads", d.k_heads}, {"v_heads", d.v_heads}, {"dk", d.dk}, {"dv", d.dv}});
  if (!sizes) return sizes;
  if (d.v_heads % d.k_heads != 0) {
    return Support::no(str_cat("v_heads=", d.v_heads, " is not a multiple of k_heads=", d.k_heads));
  }
  if (d.dk > kMaxLinearHead || d.dv > kMaxLinearHead) {
    return Support::no(str_cat("heads have ", d.dk, " and ", d.dv, " dims; kernels take at most ", kMaxLinearHead));
  }
  if (d.channel_decay && d.rule != LinearRule::delta) {
    return Support::no("channel_decay=1 needs the rule delta");
  }
  if (const Support s = check_config(Family::linear_attention, kVariants, kInstances, config, device); !s) return s;
  if ((config.variant == k_chunked || config.variant == k_chunks) && d.channel_decay) {
    return Support::no(str_cat("channel_decay=1: ", kVariants[config.variant].name, " reads one decay per head"));
  }
  if (config.variant == k_chunks) {
    if (d.dk > kMaxChunkHead) {
      return Support::no(str_cat("heads have ", d.dk, " dims; chunks takes at most ", kMaxChunkHead));
    }
    const int64_t bytes = linear_chunk_shared_bytes(d.dk);
    if (bytes > device.shared_per_block_bytes) {
      return Support::no(
          str_cat("a block takes ", bytes, " bytes of shared memory; the device has ", device.shared_per_block_bytes));
    }
  }
  return Support::yes();
}

Config default_config(const LinearAttentionDesc& desc, const DeviceInfo& device) {
  if (device.kind == DeviceKind::cuda) {
    // For runs of a few tokens, `chunks` costs as much as `tokens`.
    if (desc.m >= 16 && supports(desc, chunks_params{}, device)) return chunks_params{};
    return tokens_params{};
  }
  if (desc.m >= 16 && !desc.channel_decay) {
    return chunked_params{.tokens = static_cast<int16_t>(desc.m >= 64 ? 64 : desc.m >= 32 ? 32 : 16)};
  }
  return recurrent_params{.columns = 64};
}

Cost cost(const LinearAttentionDesc& d) {
  const auto m = static_cast<double>(d.m), state = static_cast<double>(d.state_elements());
  const double row = static_cast<double>(2 * d.k_heads * d.dk + 2 * d.v_heads * d.dv + d.steps() + d.v_heads);
  return {4 * (2 * state + m * row), m * state * (d.rule == LinearRule::delta ? 7 : 5)};
}

size_t scratch_bytes(const LinearAttentionDesc& d, const Config& config) {
  int64_t floats = 0;
  if (config.variant == k_recurrent) {
    floats = linear_token_floats(kTokens, d.dk, d.channel_decay) + d.dk;
  } else if (config.variant == k_chunked) {
    const int64_t tokens = chunked_params::of(config).tokens;
    floats = linear_token_floats(tokens, d.dk, d.channel_decay) + linear_chunk_floats(tokens, d.dk, d.dv);
  }
  return static_cast<size_t>(floats) * sizeof(float);
}

void launch(const Config& config, const LinearAttentionDesc& d, const LinearAttentionArgs& args, CpuContext& context) {
  check_runs("linear_attention", args.runs, args.n_runs, d.m, args.slot_positions);
  const bool chunked = config.variant == k_chunked;
  const int64_t columns = chunked ? d.dv : std::min<int64_t>(recurrent_params::of(config).columns, d.dv);
  const int64_t tokens = chunked ? chunked_params::of(config).tokens : kTokens;
  const int64_t parts = (d.dv + columns - 1) / columns;
  parallel_items(context, args.n_runs * d.v_heads * parts, d.m * d.state_elements(), kGrain,
                 [&](int64_t item, std::byte* scratch) {
                   const SequenceRun& run = args.runs[item / (d.v_heads * parts)];
                   const int64_t head = item / parts % d.v_heads;
                   const int64_t begin = item % parts * columns, end = std::min(begin + columns, d.dv);
                   auto* memory = reinterpret_cast<float*>(scratch);
                   float* more = memory + linear_token_floats(tokens, d.dk, d.channel_decay);
                   for (int64_t done = 0; done < run.n_tokens; done += tokens) {
                     const int64_t count = std::min<int64_t>(tokens, run.n_tokens - done);
                     const LinearTokens x =
                         prepare_tokens(args, d, run.first_token + done, count, head, run.slot, memory);
                     if (run.position == 0 && done == 0) {
                       for (int64_t i = 0; i < d.dk; ++i)
                         std::fill(x.state + i * d.dv + begin, x.state + i * d.dv + end, 0.0f);
                     }
                     if (chunked && count >= kLeastChunk) {
                       DYNO_DISPATCH_ISA(context.isa, linear_chunk(x, more));
                     } else {
                       DYNO_DISPATCH_ISA(context.isa, linear_recurrent(x, begin, end, more));
                     }
                   }
                 });
}

#ifdef DYNO_HAVE_CUDA
void launch(const Config& config, const LinearAttentionDesc& desc, const LinearAttentionArgs& args,
            CudaStream& stream) {
  if constexpr (!group_built(KernelGroup::linear_attention)) {
    throw_left_out(KernelGroup::linear_attention);
  } else {
    if (config.variant == k_chunks) {
      linear_attention_chunks(args, desc, stream);
    } else {
      linear_attention_tokens(args, desc, stream);
    }
  }
}
#endif

}  // namespace dyno::ops
